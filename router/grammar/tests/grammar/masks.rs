//! A mask's tokens are those that a matcher accepts, at every place of every answer.

use std::sync::Arc;

use plait_grammar::{
    Allowed, Cancel, Constraint, Grammar, Limits, MatchError, Matcher, Token, Vocabulary, compile,
};
use proptest::prelude::*;

use crate::support::{END, grammar, has, json, mask, regex, takes};

fn grammars() -> Vec<Grammar> {
    let tag = r#"{"structures": [{"begin": "<|call|>", "schema": {"enum": [12, true]}, "end": "."}],
                  "triggers": ["<|call|>"]}"#;
    let ebnf = r#"root ::= "{" root "}" | [0-9a-f]* | "name" root"#;
    let schema = r##"{"properties": {"name": {"type": ["string", "null"]}, "n": {"$ref": "#"}},
                     "additionalProperties": {"type": "number"}, "type": "object"}"##;
    let constraints = [
        Constraint::JsonObject,
        json(schema),
        regex(r"(\w{1,4}|é+\n)*(true|12)?"),
        Constraint::Choice(["name", "nam", "true\n"].map(str::to_owned).to_vec()),
        Constraint::Ebnf(ebnf.to_owned()),
        Constraint::StructuralTag(tag.to_owned()),
    ];
    constraints.iter().map(grammar).collect()
}

/// Goes on with the allowed token that `draw` names; None at the end.
fn step(matcher: &mut Matcher, draw: usize) -> Option<u32> {
    let (allowed, mask) = mask(matcher);
    if allowed == Allowed::OnlyEnd {
        return None;
    }
    let tokens: Vec<u32> = (0..mask.len() as u32 * 32)
        .filter(|token| has(&mask, *token))
        .collect();
    let token = tokens[draw % tokens.len()];
    matcher.accept(token).unwrap();
    (token != END).then_some(token)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(8))]

    #[test]
    fn just_the_tokens_of_a_mask_are_accepted(draws in prop::collection::vec(any::<usize>(), 0..10)) {
        for grammar in grammars() {
            let mut matcher = grammar.matcher();
            for draw in &draws {
                let (_, mask) = mask(&mut matcher);
                for token in 0..270 {
                    let taken = matcher.clone_for_choice().accept(token);
                    prop_assert_eq!(taken.is_ok(), has(&mask, token), "token {}", token);
                }
                if step(&mut matcher, *draw).is_none() {
                    break;
                }
            }
        }
    }

    #[test]
    fn a_clone_goes_its_own_way(draws in prop::collection::vec(any::<usize>(), 1..12)) {
        for grammar in grammars() {
            let mut matcher = grammar.matcher();
            for draw in &draws {
                let before = mask(&mut matcher);
                let mut other = matcher.clone_for_choice();
                let went_on = step(&mut other, *draw).is_some();
                prop_assert_eq!(&mask(&mut matcher), &before);
                if !went_on || step(&mut matcher, *draw).is_none() {
                    break;
                }
                prop_assert_eq!(mask(&mut matcher), mask(&mut other));
            }
        }
    }
}

#[test]
fn an_answer_that_nothing_can_follow_is_over() {
    let grammar = grammar(&regex("ab?"));
    let mut matcher = grammar.matcher();
    matcher.accept(b'a'.into()).unwrap();
    assert!(!matcher.is_over());
    assert_eq!(mask(&mut matcher).0, Allowed::Some);
    matcher.accept(b'b'.into()).unwrap();
    assert!(matcher.is_over());
    let (allowed, mask) = mask(&mut matcher);
    assert_eq!(allowed, Allowed::OnlyEnd);
    assert!(has(&mask, END));
    assert_eq!(matcher.accept(b'b'.into()), Err(MatchError::NotAllowed(98)));
}

#[test]
fn an_end_ends_an_answer_where_the_grammar_may_end() {
    let grammar = grammar(&regex("ab*"));
    let mut matcher = grammar.matcher();
    assert_eq!(
        matcher.clone_for_choice().accept(END),
        Err(MatchError::NotAllowed(END))
    );
    matcher.accept(b'a'.into()).unwrap();
    matcher.accept(END).unwrap();
    assert!(matcher.is_over());
}

#[test]
fn tokens_of_the_same_bytes_are_allowed_together() {
    let grammar = grammar(&regex("}"));
    let mask = mask(&mut grammar.matcher()).1;
    let twins: Vec<u32> = (0..270).filter(|token| has(&mask, *token)).collect();
    assert_eq!(twins, [u32::from(b'}'), 268]);
    assert!(takes(&grammar, "}"));
}

/// Tokens of six letters, each with as many others before it in the alphabet as any.
fn words() -> Vec<Vec<u8>> {
    let mut seed = 1_u64;
    let mut letter = || {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        b'a' + ((seed >> 33) % 26) as u8
    };
    (0..20_000)
        .map(|_| (0..6).map(|_| letter()).collect())
        .collect()
}

#[test]
fn an_expression_whose_masks_take_too_much_work_is_told_so() {
    let words = words();
    let tokens = words.iter().map(|word| Token::Text(word));
    let vocabulary = Vocabulary::new(tokens.chain([Token::Special(b"<end>")]), &[20_000]).unwrap();
    let constraint = regex("(.*[aeiou].{40}|.*[xyz].{35})END");
    let (limits, cancel) = (Limits::default(), Cancel::default());
    let grammar = compile(&Arc::new(vocabulary), &constraint, 0, &limits, &cancel).unwrap();
    let mut matcher = grammar.matcher();
    let mut mask = vec![0; grammar.num_mask_words()];
    let failed = (0..100).find_map(|token| {
        let allowed = matcher.allowed(&mut mask);
        allowed
            .map(|_| ())
            .and_then(|()| matcher.accept(token))
            .err()
    });
    assert!(
        matches!(failed, Some(MatchError::TooComplex(_))),
        "{failed:?}"
    );
}
