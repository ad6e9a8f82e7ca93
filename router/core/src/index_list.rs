//! A linked list of small integers, each in it at most once: O(1) push, removal and successor.

#[derive(Clone, Copy, Debug)]
struct Link {
    before: u32,
    after: u32,
}

/// One link for each number; a sentinel link stands before the first and after the last.
#[derive(Clone, Debug)]
pub(crate) struct IndexList {
    links: Vec<Link>,
    len: u32,
}

impl IndexList {
    /// An empty list for numbers below `num`.
    pub(crate) fn new(num: u32) -> Self {
        let links = (0..=num)
            .map(|i| Link {
                before: i,
                after: i,
            })
            .collect();
        Self { links, len: 0 }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// The sentinel: it precedes the first number and follows the last.
    pub(crate) fn end(&self) -> u32 {
        u32::try_from(self.links.len() - 1).expect("made from a u32")
    }

    pub(crate) fn before(&self, number: u32) -> u32 {
        self.links[number as usize].before
    }

    pub(crate) fn after(&self, number: u32) -> u32 {
        self.links[number as usize].after
    }

    pub(crate) fn first(&self) -> Option<u32> {
        let first = self.after(self.end());
        (first != self.end()).then_some(first)
    }

    pub(crate) fn push(&mut self, number: u32) {
        self.join(self.before(self.end()), number);
        self.join(number, self.end());
        self.len += 1;
    }

    pub(crate) fn remove(&mut self, number: u32) {
        self.join(self.before(number), self.after(number));
        self.len -= 1;
    }

    /// From the first to the last.
    pub(crate) fn iter(&self) -> impl Iterator<Item = u32> {
        std::iter::successors(self.first(), |number| {
            Some(self.after(*number)).filter(|next| *next != self.end())
        })
    }

    fn join(&mut self, before: u32, after: u32) {
        self.links[before as usize].after = after;
        self.links[after as usize].before = before;
    }
}
