//! An answer as a list of items: thoughts, texts and calls, each with a beginning and an end.

use crate::answer_parts::{CallHead, CallPiece, Part, Unsent};

/// What an item is.
#[derive(Clone, Copy, Debug)]
pub(crate) enum NewItem<'a> {
    Thought,
    Text,
    Call(&'a CallHead),
}

/// How an item ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ItemEnd {
    /// Another item follows, or the answer is complete.
    Complete,
    /// The answer was cut off within it.
    CutOff,
}

/// What is told of an answer's items; one is open at a time.
pub(crate) trait ItemEvents {
    fn begin(&mut self, item: NewItem<'_>, out: &mut Vec<u8>);

    /// More of the open item; never empty.
    fn add(&mut self, piece: &str, out: &mut Vec<u8>);

    fn end(&mut self, end: ItemEnd, out: &mut Vec<u8>);
}

/// The item that the next part may belong to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum OpenItem {
    #[default]
    None,
    Thought,
    Text,
    /// The call of this index.
    Call(usize),
}

impl OpenItem {
    /// Tells `events` of the parts that were not sent, and clears them.
    pub(crate) fn take(
        &mut self,
        unsent: &mut Unsent,
        events: &mut impl ItemEvents,
        out: &mut Vec<u8>,
    ) {
        for part in unsent.parts() {
            match part {
                Part::Text("") | Part::Thought("") => {}
                Part::Text(text) => {
                    self.open(Self::Text, NewItem::Text, events, out);
                    events.add(text, out);
                }
                Part::Thought(text) => {
                    self.open(Self::Thought, NewItem::Thought, events, out);
                    events.add(text, out);
                }
                Part::Call(call) => self.take_call(call, events, out),
            }
        }
        unsent.clear();
    }

    /// Ends the open item, if there is one.
    pub(crate) fn close(&mut self, end: ItemEnd, events: &mut impl ItemEvents, out: &mut Vec<u8>) {
        if std::mem::take(self) != Self::None {
            events.end(end, out);
        }
    }

    fn take_call(&mut self, call: &CallPiece, events: &mut impl ItemEvents, out: &mut Vec<u8>) {
        if let Some(head) = &call.head {
            self.open(Self::Call(call.index), NewItem::Call(head), events, out);
        }
        if *self == Self::Call(call.index) && !call.arguments.is_empty() {
            events.add(&call.arguments, out);
        }
    }

    fn open(
        &mut self,
        item: Self,
        new: NewItem<'_>,
        events: &mut impl ItemEvents,
        out: &mut Vec<u8>,
    ) {
        if *self == item {
            return;
        }
        self.close(ItemEnd::Complete, events, out);
        events.begin(new, out);
        *self = item;
    }
}

#[cfg(test)]
mod tests {
    use plait_text::Parsed;

    use super::*;
    use crate::answer_parts::{CallRules, Calls};

    /// Writes down what it is told.
    #[derive(Default)]
    struct Notes(String);

    impl ItemEvents for Notes {
        fn begin(&mut self, item: NewItem<'_>, _: &mut Vec<u8>) {
            self.0 += &match item {
                NewItem::Thought => "thought<".to_owned(),
                NewItem::Text => "text<".to_owned(),
                NewItem::Call(head) => format!("{}<", head.name),
            };
        }

        fn add(&mut self, piece: &str, _: &mut Vec<u8>) {
            self.0 += piece;
            self.0 += "|";
        }

        fn end(&mut self, end: ItemEnd, _: &mut Vec<u8>) {
            self.0 += match end {
                ItemEnd::Complete => "> ",
                ItemEnd::CutOff => "!",
            };
        }
    }

    const PARTS: [Parsed<'_>; 10] = [
        Parsed::Thought("a"),
        Parsed::Text("b"),
        Parsed::CallBegun {
            name: "f",
            id: None,
        },
        Parsed::Arguments("{"),
        Parsed::Arguments("}"),
        Parsed::CallEnded,
        Parsed::CallBegun {
            name: "g",
            id: None,
        },
        Parsed::CallEnded,
        Parsed::Text("c"),
        Parsed::Thought("d"),
    ];

    /// What is told of the parts, sent whenever so many of them have come.
    fn told(num_at_a_time: usize) -> String {
        let (mut item, mut calls, mut notes) =
            (OpenItem::default(), Calls::default(), Notes::default());
        for parts in PARTS.chunks(num_at_a_time) {
            let mut unsent = Unsent::default();
            for part in parts {
                calls.take(*part, (0, CallRules::default()), &mut unsent);
            }
            item.take(&mut unsent, &mut notes, &mut Vec::new());
        }
        item.close(ItemEnd::CutOff, &mut notes, &mut Vec::new());
        notes.0
    }

    #[test]
    fn items_come_in_the_models_order_however_many_parts_come_at_a_time() {
        let in_one = "thought<a|> text<b|> f<{}|> g<> text<c|> thought<d|!";
        assert_eq!(told(PARTS.len()), in_one);
        for num in 1..PARTS.len() {
            assert_eq!(told(num).replace("{|}", "{}"), in_one, "{num} at a time");
        }
    }
}
