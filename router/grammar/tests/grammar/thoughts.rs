//! A grammar behind a thought.

use plait_grammar::{Allowed, Grammar, ThoughtEnd};

use crate::support::{CALL, END, grammar, has, mask, regex};

fn behind(end: ThoughtEnd) -> Grammar {
    grammar(&regex("[0-9]+")).behind_thought(end)
}

fn text(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[test]
fn everything_is_allowed_up_to_the_thoughts_end() {
    for (end, marker) in [
        (ThoughtEnd::Text("</t>".to_owned()), text("</t>")),
        (ThoughtEnd::Token(CALL), vec![CALL]),
    ] {
        let mut matcher = behind(end).matcher();
        for token in text("12 </").into_iter().chain(marker) {
            assert_eq!(mask(&mut matcher).0, Allowed::All);
            matcher.accept(token).unwrap();
        }
        let (allowed, mask) = mask(&mut matcher);
        assert_eq!(allowed, Allowed::Some);
        assert!(has(&mask, b'7'.into()) && !has(&mask, b'x'.into()));
    }
}

#[test]
fn line_breaks_may_come_between_a_thought_and_its_answer() {
    let mut matcher = behind(ThoughtEnd::Token(CALL)).matcher();
    matcher.accept(CALL).unwrap();
    let double = 258 + 8;
    assert!(has(&mask(&mut matcher).1, double));
    matcher.accept(double).unwrap();
    assert!(!has(&mask(&mut matcher).1, double));
    assert!(!has(&mask(&mut matcher).1, b'\n'.into()));
    matcher.accept(b'7'.into()).unwrap();
    assert!(!has(&mask(&mut matcher).1, b'\n'.into()));
    assert!(has(&mask(&mut matcher).1, END));
}

#[test]
fn a_thought_may_end_the_answer() {
    let mut matcher = behind(ThoughtEnd::Token(CALL)).matcher();
    matcher.accept(END).unwrap();
    assert!(matcher.is_over());
}
