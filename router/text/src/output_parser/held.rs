//! Text that came and is not decided, and what can be read of it.

/// The text from the place where reading may have to start again, and the place read so far.
#[derive(Debug, Default)]
pub(super) struct Held {
    text: String,
    /// What is before it is forgotten at the end of the push.
    start: usize,
    at: usize,
    is_kept: bool,
}

/// Whether a marker comes next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// It was there and has been read.
    Read,
    Missing,
    /// More text decides.
    Undecided,
}

/// Bytes that a name, a key or an escape may have; longer ones are none.
pub(super) const MAX_NAME_BYTES: usize = 256;

/// White space of JSON. What else Unicode calls white space is part of a name or a value.
pub(super) const SPACES: [char; 4] = [' ', '\n', '\r', '\t'];

impl Held {
    pub(super) fn push(&mut self, piece: &str) {
        self.text.push_str(piece);
    }

    /// What has not been read.
    pub(super) fn rest(&self) -> &str {
        &self.text[self.at..]
    }

    pub(super) fn next_byte(&self) -> Option<u8> {
        self.rest().bytes().next()
    }

    pub(super) fn advance(&mut self, num_bytes: usize) {
        self.at += num_bytes;
    }

    /// Reads everything that is there.
    pub(super) fn advance_to_end(&mut self) {
        self.at = self.text.len();
    }

    pub(super) fn skip_whitespace(&mut self) {
        let rest = self.rest();
        self.at += rest.len() - rest.trim_start_matches(SPACES).len();
    }

    pub(super) fn next(&mut self, marker: &str) -> Next {
        let rest = self.rest();
        if rest.starts_with(marker) {
            self.at += marker.len();
            Next::Read
        } else if marker.starts_with(rest) {
            Next::Undecided
        } else {
            Next::Missing
        }
    }

    /// Which marker comes next, if one does; it has been read then.
    pub(super) fn next_of(&mut self, markers: &[&str]) -> Next {
        let mut found = Next::Missing;
        for marker in markers {
            match self.next(marker) {
                Next::Read => return Next::Read,
                Next::Undecided => found = Next::Undecided,
                Next::Missing => {}
            }
        }
        found
    }

    /// From here on text is kept, so that it can be taken back.
    pub(super) fn keep(&mut self) {
        self.start = self.at;
        self.is_kept = true;
    }

    /// What is read is read for good.
    pub(super) fn release(&mut self) {
        self.start = self.at;
        self.is_kept = false;
    }

    /// Reading starts again where text is kept from.
    pub(super) fn rewind(&mut self) {
        self.at = self.start;
        self.is_kept = false;
    }

    /// Reading starts again where text is kept from, if it is kept.
    pub(super) fn rewind_if_kept(&mut self) {
        if self.is_kept {
            self.rewind();
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rest().is_empty()
    }

    /// A place that stays valid while text is kept.
    pub(super) fn mark(&self) -> usize {
        self.at - self.start
    }

    /// The kept text from a mark to where reading is.
    pub(super) fn since(&self, mark: usize) -> &str {
        &self.text[self.start + mark..self.at]
    }

    /// Gives up the memory of what was read for good.
    pub(super) fn end_push(&mut self) {
        if !self.is_kept {
            self.start = self.at;
        }
        self.text.drain(..self.start);
        self.at -= self.start;
        self.start = 0;
    }
}

/// The first marker in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Found {
    pub(super) start: usize,
    /// Its index; `None` for the beginning of one at the text's end.
    pub(super) marker: Option<usize>,
}

/// The first place where a marker is, or where the text's end may become one.
pub(super) fn find(text: &str, markers: &[&str]) -> Option<Found> {
    let bytes = text.as_bytes();
    let may_begin = |byte: &u8| {
        markers
            .iter()
            .any(|marker| marker.as_bytes().first() == Some(byte))
    };
    let places = bytes.iter().enumerate().filter(|(_, byte)| may_begin(byte));
    let mut found = places.filter_map(|(start, _)| {
        let rest = &bytes[start..];
        let marker_at = |(index, marker): (usize, &&str)| {
            let is_whole = rest.starts_with(marker.as_bytes());
            let may_become = marker.as_bytes().starts_with(rest);
            (is_whole || may_become).then_some(Found {
                start,
                marker: is_whole.then_some(index),
            })
        };
        markers.iter().enumerate().find_map(marker_at)
    });
    found.next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_marker_is_found_and_the_beginning_of_one_is_awaited() {
        let markers = ["<a>", "<bc>"];
        let found = |start, marker| Some(Found { start, marker });
        assert_eq!(find("x<bc>y<a>", &markers), found(1, Some(1)));
        assert_eq!(find("x<b", &markers), found(1, None));
        assert_eq!(find("x<d<", &markers), found(3, None));
        assert_eq!(find("x<d", &markers), None);
    }

    #[test]
    fn kept_text_can_be_read_again() {
        let mut held = Held::default();
        held.push("ab");
        held.advance(1);
        held.keep();
        held.advance(1);
        held.end_push();
        held.push("c");
        held.rewind();
        assert_eq!(held.rest(), "bc");
    }
}
