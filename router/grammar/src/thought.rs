//! A thought before the answer: anything up to its end marker, then the grammar.

use crate::vocabulary::{TokenId, Vocabulary};

/// Line breaks between a thought and the answer that the grammar does not see.
const MAX_BREAKS: usize = 2;

/// What ends a thought.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ThoughtEnd {
    /// A special token.
    Token(TokenId),
    /// A text, in as many tokens as it takes.
    Text(String),
}

/// How far a thought is.
#[derive(Clone, Debug)]
pub(crate) struct Thought {
    end: ThoughtEnd,
    /// The last bytes of an open thought, fewer than its end has; None once it has ended.
    tail: Option<Vec<u8>>,
    num_breaks: usize,
}

impl Thought {
    pub(crate) fn new(end: ThoughtEnd) -> Self {
        Self {
            end,
            tail: Some(Vec::new()),
            num_breaks: 0,
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.tail.is_some()
    }

    /// A token of an open thought. The bytes behind its end, if this token ended it.
    pub(crate) fn accept(&mut self, token: TokenId, text: &[u8]) -> Option<Vec<u8>> {
        let tail = self.tail.get_or_insert_default();
        let behind = match &self.end {
            ThoughtEnd::Token(end) => (*end == token).then(Vec::new),
            ThoughtEnd::Text(end) => {
                tail.extend_from_slice(text);
                let found = find(tail, end.as_bytes());
                let behind = found.map(|at| tail[at + end.len()..].to_vec());
                let num_kept = tail.len().min(end.len().saturating_sub(1));
                tail.drain(..tail.len() - num_kept);
                behind
            }
        }?;
        self.tail = None;
        Some(behind)
    }

    /// Line breaks that may come besides what the grammar allows.
    pub(crate) fn allowed_breaks<'a>(&self, vocabulary: &'a Vocabulary) -> &'a [TokenId] {
        match self.num_breaks {
            0 => vocabulary.breaks(),
            _ => &[],
        }
    }

    pub(crate) fn is_break(&self, vocabulary: &Vocabulary, token: TokenId) -> bool {
        self.allowed_breaks(vocabulary).contains(&token)
    }

    pub(crate) fn accept_break(&mut self, text: &[u8]) {
        self.num_breaks += text.len().min(MAX_BREAKS);
    }
}

fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    text.windows(part.len().max(1)).position(|it| it == part)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_end_is_found_across_tokens_and_what_follows_it_is_the_answers() {
        let mut thought = Thought::new(ThoughtEnd::Text("</t>".to_owned()));
        for part in ["a </", "t", " </t", "</"] {
            assert_eq!(thought.accept(0, part.as_bytes()), None, "{part}");
        }
        assert_eq!(thought.accept(0, b"t>{"), Some(b"{".to_vec()));
        assert!(!thought.is_open());
    }

    #[test]
    fn a_special_token_ends_a_thought_and_its_spelling_does_not() {
        let mut thought = Thought::new(ThoughtEnd::Token(7));
        assert_eq!(thought.accept(3, b"</t>"), None);
        assert_eq!(thought.accept(7, b""), Some(Vec::new()));
    }
}
