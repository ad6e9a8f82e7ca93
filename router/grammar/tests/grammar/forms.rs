//! Forms of texts: what tool calls are made of.

use plait_grammar::{Constraint, Form, Item, Span};

use crate::support::{CALL, END, END_MARK, grammar, has, mask, takes};

fn text(text: &str) -> Form {
    Form::Text(text.to_owned())
}

fn calls(form: Form) -> plait_grammar::Grammar {
    grammar(&Constraint::Calls(form))
}

fn repeated(is_required: bool) -> Form {
    let call = |name: &str, schema: &str| {
        Form::Sequence(vec![
            text(&format!("<call>{name}:")),
            Form::Json(schema.to_owned()),
            text("</call>"),
        ])
    };
    Form::Repeated {
        item: Box::new(Form::OneOf(vec![
            call("a", r#"{"type": "integer"}"#),
            call("b", r#"{"type": "null"}"#),
        ])),
        separator: "\n".to_owned(),
        is_required,
    }
}

#[test]
fn what_is_repeated_comes_once_or_more_or_not_at_all() {
    let (one, two) = ("<call>a:1</call>", "<call>a:1</call>\n<call>b:null</call>");
    for is_required in [true, false] {
        let grammar = calls(repeated(is_required));
        let taken = ["", one, two].map(|text| takes(&grammar, text));
        assert_eq!(taken, [!is_required, true, true]);
        assert!(!takes(&grammar, "<call>a:null</call>"));
    }
}

#[test]
fn a_lists_parts_keep_their_order_and_those_that_may_be_missing_take_their_separator_along() {
    let item = |form: &str, is_required| Item {
        form: text(form),
        is_required,
    };
    let items = vec![item("a", false), item("b", true), item("c", false)];
    let list = calls(Form::Sequence(vec![
        text("("),
        Form::List(items, ", ".to_owned()),
        text(")"),
    ]));
    for (text, is_one) in [
        ("(b)", true),
        ("(a, b)", true),
        ("(b, c)", true),
        ("(a, b, c)", true),
        ("(a)", false),
        ("(, b)", false),
        ("(b, a)", false),
        ("()", false),
    ] {
        assert_eq!(takes(&list, text), is_one, "{text}");
    }
    let none = calls(Form::Sequence(vec![
        text("("),
        Form::List(vec![item("a", false), item("b", false)], ", ".to_owned()),
        text(")"),
    ]));
    for text in ["()", "(a)", "(b)", "(a, b)"] {
        assert!(takes(&none, text), "{text}");
    }
}

#[test]
fn a_text_up_to_a_mark_is_what_its_expressions_say() {
    let span = Span {
        all_of: vec!["(.|\\n){2,6}".to_owned()],
        none_of: vec!["x.*".to_owned()],
    };
    let value = calls(Form::Sequence(vec![
        text("<v>"),
        Form::UpTo(span, "\n</v>".to_owned()),
        text("."),
    ]));
    for (text, is_one) in [
        ("<v>ab\n</v>.", true),
        ("<v>a\n<b\n</v>.", true),
        ("<v>a\n</v>.", false),
        ("<v>abcdefg\n</v>.", false),
        ("<v>xyz\n</v>.", false),
        ("<v>a\n</v>b\n</v>.", false),
    ] {
        assert_eq!(takes(&value, text), is_one, "{text:?}");
    }
}

#[test]
fn free_text_goes_on_as_a_call_from_its_mark_on() {
    let in_text = |mark: &str, rest: &str| {
        Form::Sequence(vec![
            Form::Repeated {
                item: Box::new(Form::Sequence(vec![
                    Form::UpTo(Span::default(), mark.to_owned()),
                    text(rest),
                ])),
                separator: String::new(),
                is_required: false,
            },
            Form::Span(Span::default()),
        ])
    };
    let grammar = calls(in_text("<call>", "a</call>"));
    for text in [
        "",
        "so",
        "<call>a</call>",
        "I <b> <call>a</call> and <call>a</call> done",
    ] {
        assert!(takes(&grammar, text), "{text:?}");
    }
    assert!(!takes(&grammar, "so <call>b"));

    let special = calls(in_text(END_MARK, "a"));
    let mut matcher = special.matcher();
    for token in [u32::from(b's'), CALL] {
        assert!(has(&mask(&mut matcher).1, token));
        matcher.accept(token).unwrap();
    }
    let after = mask(&mut matcher).1;
    assert!(has(&after, b'a'.into()) && !has(&after, b'b'.into()) && !has(&after, END));
}

#[test]
fn a_special_tokens_spelling_within_a_text_is_the_token() {
    let grammar = calls(text(&format!("a{END_MARK}b")));
    let mut matcher = grammar.matcher();
    for token in [b'a'.into(), CALL, b'b'.into()] {
        let open = mask(&mut matcher).1;
        assert!(has(&open, token) && !has(&open, b'<'.into()));
        matcher.accept(token).unwrap();
    }
    assert!(has(&mask(&mut matcher).1, END));
}
