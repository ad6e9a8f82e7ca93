//! Grammars that requests share.

use plait_grammar::{Cancel, CompileError, Constraint, GrammarCache, Limits};

use crate::support::{grammar, regex, takes, vocabulary};

fn get(cache: &GrammarCache, constraint: &Constraint) -> bool {
    let (compiled, was_there) = cache.get(
        &vocabulary(),
        constraint,
        0,
        &Limits::default(),
        &Cancel::default(),
    );
    compiled.unwrap();
    was_there
}

#[test]
fn an_equal_constraint_is_compiled_once() {
    let cache = GrammarCache::new(64 << 20);
    assert!(!get(&cache, &regex("a+")));
    assert!(get(&cache, &regex("a+")));
    assert!(!get(&cache, &regex("b+")));
}

#[test]
fn what_was_used_last_stays() {
    let one = grammar(&regex("a+")).num_bytes();
    let cache = GrammarCache::new(5 * one / 2);
    for expression in ["a+", "b+", "a+", "c+"] {
        get(&cache, &regex(expression));
        assert!(cache.num_bytes() <= 5 * one / 2);
    }
    assert!(get(&cache, &regex("a+")));
    assert!(!get(&cache, &regex("b+")));
}

#[test]
fn what_was_refused_is_remembered() {
    let cache = GrammarCache::new(64 << 20);
    for was_there in [false, true] {
        let refused = cache.get(
            &vocabulary(),
            &regex("(a"),
            0,
            &Limits::default(),
            &Cancel::default(),
        );
        assert!(matches!(refused.0, Err(CompileError::Malformed(_))));
        assert_eq!(refused.1, was_there);
    }
}

#[test]
fn answers_of_one_grammar_do_not_meet() {
    let grammar = grammar(&regex("(ab|ba){8}"));
    let texts = ["ab".repeat(8), "ba".repeat(8)];
    std::thread::scope(|scope| {
        for text in texts.iter().cycle().take(12) {
            let grammar = grammar.clone();
            scope.spawn(move || assert!(takes(&grammar, text)));
        }
    });
}
