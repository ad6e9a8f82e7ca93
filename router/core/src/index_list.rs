//! Linked lists of small integers, each in one of them at most: O(1) push, removal and successor.

#[derive(Clone, Copy, Debug)]
struct Link {
    before: u32,
    after: u32,
    /// The list that the number was pushed to last.
    list: u32,
}

/// One link for each number, and a sentinel for each list, before its first number and after its last.
#[derive(Clone, Debug)]
pub(crate) struct IndexLists {
    links: Vec<Link>,
    num: u32,
}

impl IndexLists {
    /// Empty lists of numbers below `num`.
    pub(crate) fn new(num: u32, num_lists: u32) -> Self {
        let links = (0..num + num_lists)
            .map(|i| Link {
                before: i,
                after: i,
                list: 0,
            })
            .collect();
        Self { links, num }
    }

    /// The list that a number is in.
    pub(crate) fn list_of(&self, number: u32) -> u32 {
        self.links[number as usize].list
    }

    /// A list's sentinel: it precedes the first number and follows the last.
    pub(crate) fn end(&self, list: u32) -> u32 {
        self.num + list
    }

    pub(crate) fn before(&self, number: u32) -> u32 {
        self.links[number as usize].before
    }

    pub(crate) fn after(&self, number: u32) -> u32 {
        self.links[number as usize].after
    }

    pub(crate) fn first(&self, list: u32) -> Option<u32> {
        let first = self.after(self.end(list));
        (first != self.end(list)).then_some(first)
    }

    pub(crate) fn push(&mut self, list: u32, number: u32) {
        let end = self.end(list);
        self.join(self.before(end), number);
        self.join(number, end);
        self.links[number as usize].list = list;
    }

    pub(crate) fn remove(&mut self, number: u32) {
        self.join(self.before(number), self.after(number));
    }

    /// From the first to the last.
    pub(crate) fn iter(&self, list: u32) -> impl Iterator<Item = u32> {
        std::iter::successors(self.first(list), move |number| {
            Some(self.after(*number)).filter(|next| *next != self.end(list))
        })
    }

    fn join(&mut self, before: u32, after: u32) {
        self.links[before as usize].after = after;
        self.links[after as usize].before = before;
    }
}

/// One such list.
#[derive(Clone, Debug)]
pub(crate) struct IndexList {
    lists: IndexLists,
    len: u32,
}

impl IndexList {
    /// An empty list for numbers below `num`.
    pub(crate) fn new(num: u32) -> Self {
        let lists = IndexLists::new(num, 1);
        Self { lists, len: 0 }
    }

    pub(crate) fn len(&self) -> u32 {
        self.len
    }

    /// The sentinel: it precedes the first number and follows the last.
    pub(crate) fn end(&self) -> u32 {
        self.lists.end(0)
    }

    pub(crate) fn before(&self, number: u32) -> u32 {
        self.lists.before(number)
    }

    pub(crate) fn after(&self, number: u32) -> u32 {
        self.lists.after(number)
    }

    pub(crate) fn push(&mut self, number: u32) {
        self.lists.push(0, number);
        self.len += 1;
    }

    pub(crate) fn remove(&mut self, number: u32) {
        self.lists.remove(number);
        self.len -= 1;
    }
}
