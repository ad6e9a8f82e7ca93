//! A grammar behind a thought.

use plait_grammar::{Allowed, Constraint, Grammar, Matcher, ThoughtRule, TokenId};

use crate::support::{CALL, END, END_MARK, grammar, has, mask, regex};

/// The mark of a thought's end as text; as a special token it is `END_MARK`.
const TEXT_MARK: &str = "</t>";

fn rule(open: Option<&str>, close: &str, max_tokens: Option<u32>) -> ThoughtRule {
    ThoughtRule {
        open: open.map(str::to_owned),
        close: close.to_owned(),
        max_tokens,
    }
}

fn digits(rule: ThoughtRule) -> Matcher {
    grammar(&regex("[0-9]+")).behind_thought(rule).matcher()
}

fn free(rule: ThoughtRule) -> Matcher {
    let free: Grammar = grammar(&Constraint::Free);
    free.behind_thought(rule).matcher()
}

fn text(text: &str) -> Vec<TokenId> {
    text.bytes().map(TokenId::from).collect()
}

fn say(matcher: &mut Matcher, text: &str) {
    for byte in text.bytes() {
        matcher.accept(byte.into()).unwrap();
    }
}

fn may_come(matcher: &mut Matcher, letters: &str) -> Vec<bool> {
    let (allowed, mask) = mask(matcher);
    let is_free = matches!(allowed, Allowed::All | Allowed::Free);
    let letters = letters.bytes();
    letters.map(|it| is_free || has(&mask, it.into())).collect()
}

/// The tokens that are forced, one after the other.
fn forced(matcher: &mut Matcher) -> Vec<TokenId> {
    let mut tokens = Vec::new();
    loop {
        let (allowed, mask) = mask(matcher);
        let mut open = (0..270).filter(|token| has(&mask, *token));
        let (Allowed::Some, Some(one), None) = (allowed, open.next(), open.next()) else {
            return tokens;
        };
        matcher.accept(one).unwrap();
        tokens.push(one);
    }
}

#[test]
fn everything_but_the_answers_end_may_come_before_the_thoughts_end() {
    for (close, marker) in [(TEXT_MARK, text(TEXT_MARK)), (END_MARK, vec![CALL])] {
        let mut matcher = digits(rule(None, close, None));
        for token in text("12 </").into_iter().chain(marker) {
            let (_, mask) = mask(&mut matcher);
            assert!(has(&mask, b'x'.into()) && has(&mask, token) && !has(&mask, END));
            matcher.accept(token).unwrap();
        }
        assert_eq!(may_come(&mut matcher, "7x"), [true, false]);
    }
}

#[test]
fn line_breaks_may_come_between_a_thought_and_its_answer() {
    let mut matcher = digits(rule(None, END_MARK, None));
    matcher.accept(CALL).unwrap();
    let double = 258 + 8;
    assert!(has(&mask(&mut matcher).1, double));
    matcher.accept(double).unwrap();
    assert!(!has(&mask(&mut matcher).1, double));
    assert_eq!(may_come(&mut matcher, "\n"), [false]);
    say(&mut matcher, "7");
    assert_eq!(may_come(&mut matcher, "\n"), [false]);
    assert!(has(&mask(&mut matcher).1, END));
}

#[test]
fn two_line_breaks_may_be_two_tokens() {
    let mut matcher = digits(rule(None, END_MARK, None));
    matcher.accept(CALL).unwrap();
    say(&mut matcher, "\n");
    assert_eq!(may_come(&mut matcher, "\n7"), [true, true]);
    say(&mut matcher, "\n");
    assert_eq!(may_come(&mut matcher, "\n7"), [false, true]);
}

#[test]
fn a_token_that_says_more_than_the_thoughts_end_is_closed() {
    // `call>` is a token, and `>` with more behind it is none that the answer takes.
    let mut matcher = digits(rule(None, "<ca", None));
    say(&mut matcher, "<");
    let call = 258 + 9;
    assert!(!has(&mask(&mut matcher).1, call));
    assert_eq!(may_come(&mut matcher, "c"), [true]);
}

#[test]
fn a_model_that_may_think_first_does_so_or_answers() {
    let mut answers = digits(rule(Some("<t>"), TEXT_MARK, None));
    assert_eq!(may_come(&mut answers, "7<x"), [true, true, false]);
    say(&mut answers, "7");
    assert_eq!(may_come(&mut answers, "7<x"), [true, false, false]);

    let mut thinks = digits(rule(Some("<t>"), TEXT_MARK, None));
    say(&mut thinks, "<");
    assert_eq!(may_come(&mut thinks, "7<t"), [false, false, true]);
    say(&mut thinks, "t>x</t>");
    assert_eq!(may_come(&mut thinks, "7<x"), [true, false, false]);
}

#[test]
fn what_begins_like_a_thought_may_be_the_answer() {
    let behind = |text: &str| {
        let tag = grammar(&regex("<(a|t>b)")).behind_thought(rule(Some("<t>"), TEXT_MARK, None));
        let mut matcher = tag.matcher();
        say(&mut matcher, text);
        matcher
    };
    assert_eq!(may_come(&mut behind("<"), "atx"), [true, true, false]);
    assert!(has(&mask(&mut behind("<a")).1, END));
    assert_eq!(may_come(&mut behind("<t>"), "bx"), [true, true]);
    assert_eq!(may_come(&mut behind("<t>b</t>"), "<b"), [true, false]);
}

#[test]
fn a_budget_forces_the_thoughts_end() {
    for (close, marker) in [(TEXT_MARK, text(TEXT_MARK)), (END_MARK, vec![CALL])] {
        for budget in 0..4 {
            for mut matcher in [
                digits(rule(None, close, Some(budget))),
                free(rule(None, close, Some(budget))),
            ] {
                say(&mut matcher, &"abcd"[..budget as usize]);
                assert_eq!(forced(&mut matcher), marker, "{budget}");
            }
        }
    }
}

#[test]
fn a_budget_counts_what_comes_behind_the_models_own_beginning() {
    let mut matcher = free(rule(Some("<t>"), TEXT_MARK, Some(2)));
    say(&mut matcher, "<t>ab");
    assert_eq!(forced(&mut matcher), text(TEXT_MARK));
    assert_eq!(mask(&mut matcher).0, Allowed::Free);
}

#[test]
fn an_end_that_has_begun_when_the_budget_is_spent_is_completed() {
    let mut matcher = free(rule(None, TEXT_MARK, Some(3)));
    say(&mut matcher, "a</");
    assert_eq!(forced(&mut matcher), text("t>"));
}

#[test]
fn an_answer_without_a_grammar_is_free_behind_its_thought_and_without_one() {
    for said in ["<t>ab</t>", "7", "<x"] {
        let mut matcher = free(rule(Some("<t>"), TEXT_MARK, Some(9)));
        assert_eq!(mask(&mut matcher).0, Allowed::All);
        say(&mut matcher, said);
        assert_eq!(mask(&mut matcher).0, Allowed::Free, "{said}");
    }
}
