//! Small constraints that become large: refused by name, or held within the limits.

use plait_grammar::{Allowed, CompileError, Constraint};

use crate::support::{json, regex, try_compile};

fn is_refused_or_works(constraint: &Constraint) -> Option<CompileError> {
    match try_compile(constraint) {
        Ok(grammar) => {
            let mut matcher = grammar.matcher();
            for _ in 0..64 {
                let mut words = vec![0; grammar.num_mask_words()];
                match matcher.allowed(&mut words) {
                    Ok(Allowed::OnlyEnd) | Err(_) => break,
                    Ok(_) => {}
                }
                let mut tokens = (0..256)
                    .rev()
                    .filter(|it| words[it / 32] >> (it % 32) & 1 == 1);
                let Some(token) = tokens.next() else { break };
                if matcher.accept(token as u32).is_err() {
                    break;
                }
            }
            None
        }
        Err(error) => Some(error),
    }
}

#[test]
fn schemas_that_double_at_each_step_are_refused() {
    let mut definitions = vec![r#""d0": {"type": "string"}"#.to_owned()];
    for index in 1..40 {
        let before = index - 1;
        definitions.push(format!(
            r##""d{index}": {{"allOf": [{{"anyOf": [{{"$ref": "#/$defs/d{before}"}}, {{"type": "object", "properties": {{"x{index}": {{"$ref": "#/$defs/d{before}"}}}}}}]}}, {{"anyOf": [{{"$ref": "#/$defs/d{before}"}}, {{"type": "object", "properties": {{"y{index}": {{"$ref": "#/$defs/d{before}"}}}}}}]}}]}}"##
        ));
    }
    let schema = format!(
        r##"{{"$ref": "#/$defs/d39", "$defs": {{{}}}}}"##,
        definitions.join(",")
    );
    let error = is_refused_or_works(&json(&schema)).expect("it is refused");
    assert!(
        matches!(
            error,
            CompileError::TooComplex(_) | CompileError::TooSlow(_)
        ),
        "{error}"
    );
}

#[test]
fn a_long_chain_of_references_needs_no_more_stack_than_there_is() {
    for sibling in ["", r#""type": "string", "#] {
        let definitions: Vec<String> = (0..3000)
            .map(|it| format!(r##""d{it}": {{{sibling}"$ref": "#/$defs/d{}"}}"##, it + 1))
            .collect();
        let schema = format!(
            r##"{{"$ref": "#/$defs/d0", "$defs": {{{}, "d3000": {{"type": "string"}}}}}}"##,
            definitions.join(",")
        );
        is_refused_or_works(&json(&schema));
    }
}

#[test]
fn references_in_a_circle_are_refused_or_harmless() {
    for schema in [
        r##"{"$ref": "#"}"##,
        r##"{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}"##,
        r##"{"$ref": "#/$defs/a", "$defs": {"a": {"type": "string", "$ref": "#/$defs/a"}}}"##,
        r##"{"allOf": [{"$ref": "#"}]}"##,
        r##"{"anyOf": [{"$ref": "#"}, {"type": "null"}]}"##,
    ] {
        is_refused_or_works(&json(schema));
    }
}

#[test]
fn wide_schemas_and_long_enumerations_stay_within_the_limits() {
    let words: Vec<String> = (0..20_000).map(|it| format!("\"w{it}\"")).collect();
    is_refused_or_works(&json(&format!(r#"{{"enum": [{}]}}"#, words.join(","))));
    let properties: Vec<String> = (0..8000).map(|it| format!(r#""p{it}": {{}}"#)).collect();
    let wide = format!(
        r#"{{"type": "object", "properties": {{{}}}}}"#,
        properties.join(",")
    );
    is_refused_or_works(&json(&wide));
}

#[test]
fn counts_of_a_billion_stay_within_the_limits() {
    for schema in [
        r#"{"type": "array", "minItems": 1000000000}"#,
        r#"{"type": "array", "items": {"type": "array", "maxItems": 1000000000}, "maxItems": 1000000000}"#,
        r#"{"type": "string", "minLength": 1000000000}"#,
        r#"{"type": "string", "maxLength": 4000000000}"#,
        r#"{"type": "object", "maxProperties": 1000000000}"#,
        r#"{"type": "number", "multipleOf": 1e-9}"#,
        r#"{"type": "integer", "multipleOf": 4294967291}"#,
    ] {
        is_refused_or_works(&json(schema));
    }
    is_refused_or_works(&Constraint::Ebnf(
        r#"root ::= (("a"{1,9999}){1,9999}){1,9999}"#.to_owned(),
    ));
}

#[test]
fn expressions_that_explode_stay_within_the_limits() {
    for expression in [
        "(a{1000}){1000}",
        "((((a{9999}){9999}){9999}){9999}){9999}",
        "(a|b)*a(a|b){20}",
        "(x+x+)+y",
        r"(\w{1,500} ){1,500}",
        "(.*a){30}",
        "(.|\n)*(a.{900}|b.{800})",
    ] {
        is_refused_or_works(&regex(expression));
        let pattern = expression.replace('\\', "\\\\").replace('\n', "\\n");
        is_refused_or_works(&json(&format!(
            r#"{{"type": "string", "pattern": "{pattern}"}}"#
        )));
    }
    is_refused_or_works(&regex(&("(".repeat(4000) + &")?".repeat(4000))));
    is_refused_or_works(&regex(&"(a|b)*c?".repeat(1000)));
}

#[test]
fn a_grammar_of_many_ways_is_slow_for_itself_only() {
    let ambiguous = r#"root ::= root root | "a" | "a" root | """#;
    is_refused_or_works(&Constraint::Ebnf(ambiguous.to_owned()));
    let deep = "(".repeat(5000) + "\"a\"" + &")".repeat(5000);
    is_refused_or_works(&Constraint::Ebnf(format!("root ::= {deep}")));
    let lark = "start: ".to_owned() + &"(".repeat(5000) + "\"a\"" + &")".repeat(5000);
    is_refused_or_works(&Constraint::Ebnf(lark));
    let chain: Vec<String> = (0..2500)
        .map(|it| format!("T{it}: \"a\" T{}?", it + 1))
        .collect();
    is_refused_or_works(&Constraint::Ebnf(format!(
        "start: T0\n{}\nT2500: \"b\"",
        chain.join("\n")
    )));
}
