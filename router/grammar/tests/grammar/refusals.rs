//! What is refused, and what the refusal says.

use plait_grammar::{Constraint, Limits, Whitespace};

use crate::support::{json, refusal, regex};

#[test]
fn what_is_too_large_says_how_large_and_what_is_allowed() {
    let limits = Limits::default();
    let deep = "[".repeat(65) + &"]".repeat(65);
    let choices = vec!["a".to_owned(); limits.num_choices + 1];
    for (constraint, said) in [
        (
            json(&" ".repeat((256 << 10) + 1)),
            "262145 bytes, where at most 262144",
        ),
        (json(&deep), "65 levels of nesting, where at most 64"),
        (regex(&"a".repeat(8193)), "8193 bytes, where at most 8192"),
        (
            Constraint::Choice(choices),
            "1025 choices, where at most 1024",
        ),
    ] {
        let refused = refusal(&constraint);
        assert!(refused.contains(said), "{refused}");
    }
}

#[test]
fn keywords_that_no_mask_holds_are_named() {
    for (keyword, value) in [
        ("uniqueItems", "true"),
        ("contains", "{}"),
        ("not", r#"{"type": "null"}"#),
        ("if", r#"{}, "then": {"type": "null"}"#),
        ("propertyNames", r#"{"maxLength": 1}"#),
        ("dependentRequired", r#"{"a": ["b"]}"#),
        ("dependentSchemas", r#"{"a": {}}"#),
        ("dependencies", r#"{"a": ["b"]}"#),
        ("unevaluatedProperties", "false"),
        ("unevaluatedItems", "false"),
        ("$dynamicRef", r##""#a""##),
        ("minProperties", "3"),
        ("const", "9007199254740993"),
        ("enum", r#"[{"a": "\u0001"}]"#),
        ("format", r#""uri-template""#),
    ] {
        // Older drafts do not know some of them, which changes nothing.
        for draft in [
            "",
            r#""$schema": "http://json-schema.org/draft-04/schema#", "#,
        ] {
            let refused = refusal(&json(&format!(r#"{{{draft}"{keyword}": {value}}}"#)));
            assert!(refused.contains(&format!("`{keyword}`")), "{refused}");
        }
    }
}

#[test]
fn options_that_may_hold_together_are_no_one_of() {
    let refused = refusal(&json(
        r#"{"oneOf": [{"type": "number"}, {"type": "integer"}]}"#,
    ));
    assert!(refused.contains("`oneOf`"), "{refused}");
}

#[test]
fn what_matches_nothing_is_refused() {
    for constraint in [
        json("false"),
        json(r#"{"type": "integer", "minimum": 2, "maximum": 1}"#),
        json(r#"{"enum": []}"#),
        json(r#"{"type": "object", "required": ["a"], "properties": {"a": false}}"#),
        regex(r"[^\s\S]"),
        Constraint::Choice(Vec::new()),
    ] {
        let refused = refusal(&constraint);
        assert!(
            refused.contains("allows no answer"),
            "{constraint:?}: {refused}"
        );
    }
}

#[test]
fn what_never_ends_is_refused() {
    for constraint in [
        Constraint::Ebnf(r#"root ::= "a" root"#.to_owned()),
        Constraint::Ebnf(
            r#"root ::= "x" | "a" inner
                            inner ::= "(" inner ")" | inner "b""#
                .to_owned(),
        ),
        json(r##"{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}"##),
    ] {
        let refused = refusal(&constraint);
        assert!(refused.contains("never ends"), "{constraint:?}: {refused}");
    }
}

#[test]
fn what_cannot_be_read_says_where() {
    for (constraint, said) in [
        (json("{"), "no JSON"),
        (json("7"), "an object, true or false"),
        (json(r#"{"type": "text"}"#), "text"),
        (json(r##"{"$ref": "#/none"}"##), "none"),
        (
            json(r#"{"$ref": "https://example.com/schema"}"#),
            "example.com",
        ),
        (regex("(a"), "unclosed group"),
        (
            Constraint::Ebnf("root ::= other".to_owned()),
            "no rule `other`",
        ),
        (Constraint::Ebnf("root ::= \"a".to_owned()), "no closing"),
        (Constraint::Ebnf("start: !".to_owned()), "!"),
        (Constraint::StructuralTag("{}".to_owned()), "`structures`"),
        (
            Constraint::StructuralTag(
                r#"{"format": {"type": "sequence", "elements": []}}"#.to_owned(),
            ),
            "`sequence`",
        ),
        (
            Constraint::StructuralTag(r#"{"format": {"type": "json_schema"}}"#.to_owned()),
            "`json_schema`",
        ),
        (
            Constraint::JsonSchema("{}".to_owned(), Whitespace::Pattern("[^a]".to_owned())),
            "whitespace pattern",
        ),
    ] {
        let refused = refusal(&constraint);
        assert!(refused.contains(said), "{constraint:?}: {refused}");
    }
}

#[test]
fn a_regular_expression_that_looks_around_is_refused() {
    for constraint in [
        regex("a(?=b)"),
        json(r#"{"type": "string", "pattern": "^(?!a)"}"#),
    ] {
        let refused = refusal(&constraint);
        assert!(refused.contains("look-around"), "{refused}");
    }
}
