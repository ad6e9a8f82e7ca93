//! What each kind of constraint takes.

use plait_grammar::{Constraint, Whitespace};

use crate::support::{grammar, json, regex, takes};

#[test]
fn a_json_object_is_an_object_and_nothing_else() {
    let grammar = grammar(&Constraint::JsonObject);
    assert!(takes(&grammar, r#"{}"#));
    assert!(takes(&grammar, "{\n  \"a\": [1, {\"b\": null}]\n}"));
    for other in ["[]", "1", "{", r#"{"a"}"#, r#"{"a": 1} "#, r#" {}"#] {
        assert!(!takes(&grammar, other), "{other}");
    }
}

#[test]
fn a_schema_holds_types_bounds_and_names() {
    let schema = r#"{
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 3},
            "age": {"type": "integer", "minimum": 0, "maximum": 120}
        },
        "required": ["name", "age"],
        "additionalProperties": false
    }"#;
    let grammar = grammar(&json(schema));
    assert!(takes(&grammar, r#"{"name": "Zoé", "age": 7}"#));
    for other in [
        r#"{"name": "Anna", "age": 7}"#,
        r#"{"name": "Bo", "age": 121}"#,
        r#"{"name": "Bo"}"#,
        r#"{"name": "Bo", "age": 7, "more": 1}"#,
        r#"{"name": "Bo", "age": "7"}"#,
    ] {
        assert!(!takes(&grammar, other), "{other}");
    }
}

#[test]
fn json_without_spaces_has_none() {
    let schema = r#"{"properties": {"a": {"type": "integer"}}, "required": ["a"]}"#;
    let grammar = grammar(&Constraint::JsonSchema(schema.to_owned(), Whitespace::None));
    assert!(takes(&grammar, r#"{"a":1}"#));
    assert!(!takes(&grammar, r#"{"a": 1}"#));
}

#[test]
fn json_has_the_spaces_of_its_pattern_and_no_others() {
    let schema = r#"{"properties": {"a": {"type": "integer"}}, "required": ["a"]}"#.to_owned();
    for (pattern, one, two) in [
        (" ?", true, false),
        ("[ ]{2}", false, true),
        (r"\s*", true, true),
    ] {
        let whitespace = Whitespace::Pattern(pattern.to_owned());
        let grammar = grammar(&Constraint::JsonSchema(schema.clone(), whitespace));
        assert!(
            takes(&grammar, r#"{"a":1}"#) || pattern.ends_with('}'),
            "{pattern}"
        );
        assert_eq!(takes(&grammar, r#"{"a": 1}"#), one, "{pattern}");
        assert_eq!(takes(&grammar, r#"{"a":  1}"#), two, "{pattern}");
    }
}

#[test]
fn a_run_of_spaces_ends() {
    let grammar = grammar(&Constraint::JsonObject);
    assert!(takes(&grammar, &format!("{{{}}}", " ".repeat(128))));
    assert!(!takes(&grammar, &format!("{{{}}}", " ".repeat(129))));
}

#[test]
fn a_listed_name_has_one_spelling_and_no_other_value() {
    let grammar = grammar(&json(r#"{"properties": {"a": {"type": "integer"}}}"#));
    assert!(takes(&grammar, r#"{"a": 1, "b": "x"}"#));
    assert!(!takes(&grammar, r#"{"\u0061": "x"}"#));
    assert!(!takes(&grammar, r#"{"b": 1, "a": "x"}"#));
}

#[test]
fn a_regular_expression_matches_the_whole_text() {
    for anchored in ["[a-c]+(x|y{2})", "^[a-c]+(x|y{2})$"] {
        let grammar = grammar(&regex(anchored));
        assert!(takes(&grammar, "abcx"));
        assert!(takes(&grammar, "ayy"));
        assert!(!takes(&grammar, "ay"));
        assert!(!takes(&grammar, "x"));
    }
    assert!(takes(&grammar(&regex(r"costs \$")), "costs $"));
    assert!(takes(&grammar(&regex(r"a/b\n.")), "a/b\né"));
}

#[test]
fn a_choice_is_one_of_its_texts() {
    let texts = ["a", "a \"b\"\n", "ab", "é{"];
    let constraint = Constraint::Choice(texts.map(str::to_owned).to_vec());
    let grammar = grammar(&constraint);
    for text in texts {
        assert!(takes(&grammar, text), "{text:?}");
    }
    assert!(!takes(&grammar, "abc"));
    assert!(!takes(&grammar, ""));
}

#[test]
fn a_grammar_without_recursion_loses_no_text_to_the_lexer() {
    let ebnf = r#"
        # digits swallow nothing
        root ::= [a-z]* "x" (" " number)? | "\x41"{2}
        number ::= [0-9]{1,3}
    "#;
    let grammar = grammar(&Constraint::Ebnf(ebnf.to_owned()));
    for text in ["x", "axx", "abx 12", "AA"] {
        assert!(takes(&grammar, text), "{text:?}");
    }
    for text in ["a", "x 1234", "A", "x12"] {
        assert!(!takes(&grammar, text), "{text:?}");
    }
}

#[test]
fn a_recursive_grammar_counts_its_brackets() {
    let ebnf = r#"
        pair ::= "(" pair ")" | word
        word ::= ("ab" | [a-z]) "b" | ""
    "#;
    let grammar = grammar(&Constraint::Ebnf(ebnf.to_owned()));
    for text in ["", "((ab))", "(abb)", "()"] {
        assert!(takes(&grammar, text), "{text:?}");
    }
    for text in ["(", "((ab)", "(a)", ")"] {
        assert!(!takes(&grammar, text), "{text:?}");
    }
}

#[test]
fn lark_is_a_grammar_too() {
    let grammar = grammar(&Constraint::Ebnf("start: \"a\" B*\nB: /[0-9]/".to_owned()));
    assert!(takes(&grammar, "a12"));
    assert!(!takes(&grammar, "12"));
}

#[test]
fn a_structural_tag_leaves_text_free_up_to_a_trigger() {
    let tag = r#"{
        "structures": [
            {"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"},
            {"begin": "<f=b>", "schema": {"type": "boolean"}, "end": "</f>"}
        ],
        "triggers": ["<f="]
    }"#;
    let grammar = grammar(&Constraint::StructuralTag(tag.to_owned()));
    for text in ["", "so be it", "so <f=a>12</f> and <f=b>true</f>."] {
        assert!(takes(&grammar, text), "{text:?}");
    }
    for text in ["<f=c>", "<f=a>true</f>", "<f=a>12"] {
        assert!(!takes(&grammar, text), "{text:?}");
    }
}

#[test]
fn the_newer_form_of_structural_tags_means_the_same() {
    let tags = r#"[{"begin": "<f=a>", "content": {"type": "json_schema", "json_schema": {"type": "integer"}}, "end": "</f>"},
                   {"type": "tag", "begin": "<f=b>", "content": {"type": "regex", "pattern": "x+"}, "end": "</f>"}]"#;
    let (a, b) = ("<f=a>12</f>", "<f=b>xx</f>");
    for (format, taken, refused) in [
        (
            format!(r#"{{"type": "triggered_tags", "triggers": ["<f="], "tags": {tags}}}"#),
            vec!["", "so be it", "so <f=a>12</f> and <f=b>xx</f>."],
            vec!["<f=c>", "<f=a>true</f>"],
        ),
        (
            format!(r#"{{"type": "triggered_tags", "triggers": ["<f="], "tags": {tags}, "at_least_one": true}}"#),
            vec!["so <f=a>12</f>."],
            vec!["so be it"],
        ),
        (
            format!(r#"{{"type": "tags_with_separator", "separator": ";", "tags": {tags}}}"#),
            vec!["", a, "<f=a>12</f>;<f=b>xx</f>"],
            vec!["<f=a>12</f><f=b>xx</f>", "so"],
        ),
        (
            r#"{"type": "tag", "begin": "(", "content": {"type": "regex", "pattern": "x+"}, "end": ")"}"#.to_owned(),
            vec!["(x)"],
            vec!["", "x", b],
        ),
        (
            r#"{"type": "json_schema", "json_schema": {"type": "integer"}}"#.to_owned(),
            vec!["12"],
            vec!["true"],
        ),
    ] {
        let tag = format!(r#"{{"type": "structural_tag", "format": {format}}}"#);
        let grammar = grammar(&Constraint::StructuralTag(tag));
        assert!(taken.iter().all(|text| takes(&grammar, text)), "{format}");
        assert!(!refused.iter().any(|text| takes(&grammar, text)), "{format}");
    }
}

#[test]
fn dates_and_times_are_those_of_the_calendar() {
    let dates = grammar(&json(r#"{"type": "string", "format": "date"}"#));
    for (date, is_one) in [
        ("2024-02-29", true),
        ("2000-02-29", true),
        ("2023-02-29", false),
        ("1900-02-29", false),
        ("2023-04-31", false),
        ("2023-12-31", true),
    ] {
        assert_eq!(takes(&dates, &format!("\"{date}\"")), is_one, "{date}");
    }
    let times = grammar(&json(r#"{"type": "string", "format": "date-time"}"#));
    assert!(takes(&times, r#""2024-02-29T23:59:59.5+01:00""#));
    assert!(!takes(&times, r#""2024-02-29T23:58:60Z""#));
}

#[test]
fn one_of_some_types_is_a_type_that_no_other_option_has() {
    let schema = r#"{"oneOf": [{"type": ["string", "null"]}, {"type": ["integer", "null"]}]}"#;
    let grammar = grammar(&json(schema));
    assert!(takes(&grammar, "\"a\"") && takes(&grammar, "12"));
    assert!(!takes(&grammar, "null") && !takes(&grammar, "1.5"));
}
