//! What a request may constrain its answer to.

use std::sync::{Arc, OnceLock};

use plait_grammar::{
    Allowed, Cancel, Constraint, Limits, Token, TokenId, Vocabulary, Whitespace, compile,
};

use super::Target;

const SCHEMA: &[&[u8]] = &[
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b"\"type\"",
    b"\"object\"",
    b"\"array\"",
    b"\"string\"",
    b"\"properties\"",
    b"\"items\"",
    b"\"required\"",
    b"\"additionalProperties\"",
    b"\"anyOf\"",
    b"\"allOf\"",
    b"\"oneOf\"",
    b"\"not\"",
    b"\"$ref\"",
    b"\"#/$defs/a\"",
    b"\"#\"",
    b"\"$defs\"",
    b"\"enum\"",
    b"\"const\"",
    b"\"pattern\"",
    b"\"(a|b)*c\"",
    b"\"format\"",
    b"\"date-time\"",
    b"\"minItems\"",
    b"\"maxItems\"",
    b"\"minLength\"",
    b"\"maxLength\"",
    b"\"minimum\"",
    b"\"multipleOf\"",
    b"\"patternProperties\"",
    b"\"x-guidance\"",
    b"\"$id\"",
    b"\"uniqueItems\"",
];

const REGEX: &[&[u8]] = &[
    b"(",
    b")",
    b"[",
    b"]",
    b"{1,1000}",
    b"{1000}",
    b"*",
    b"+",
    b"?",
    b"|",
    b"\\d",
    b"\\p{L}",
    b"\\b",
    b"^",
    b"$",
    b"(?i)",
    b"(?=",
    b"(?P<a>",
    b"[^",
    b"\\x{10ffff}",
    b".",
    b"&",
    b"~(",
    b"\\1",
];

const GRAMMAR: &[&[u8]] = &[
    b"root ::= ",
    b"::=",
    b"start: ",
    b"a ::= a a | \"x\"\n",
    b"\"",
    b"[a-z]",
    b"[^\\n]",
    b"*",
    b"+",
    b"{1,10000}",
    b"(",
    b")",
    b"|",
    b"%json {",
    b"%ignore ",
    b"%import ",
    b"%llguidance {}",
    b"/a*/",
    b"#",
    b"//",
    b"\\x41",
    b"<[1]>",
    b"@a",
    b"lazy",
    b"[max_tokens=1]",
    b"%regex {",
    b"%lark {",
];

const TAG: &[&[u8]] = &[
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b"\"type\"",
    b"\"structural_tag\"",
    b"\"structures\"",
    b"\"triggers\"",
    b"\"begin\"",
    b"\"end\"",
    b"\"schema\"",
    b"\"format\"",
    b"\"tag\"",
    b"\"content\"",
    b"\"triggered_tags\"",
    b"\"tags\"",
    b"\"at_least_one\"",
    b"\"stop_after_first\"",
    b"\"json_schema\"",
    b"\"\"",
];

pub fn all() -> [Target; 4] {
    let target = |name, words, num_reduced, decode| Target {
        name,
        words,
        max_mib: 1024,
        num_reduced,
        decode,
    };
    [
        target("schema", SCHEMA, 100, |input| {
            follow(input, |text| Constraint::JsonSchema(text, Whitespace::Free))
        }),
        target("regex", REGEX, 100, |input| {
            follow(input, Constraint::Regex)
        }),
        target("grammar", GRAMMAR, 100, |input| {
            follow(input, Constraint::Ebnf)
        }),
        target("structural_tag", TAG, 100, |input| {
            follow(input, Constraint::StructuralTag)
        }),
    ]
}

/// Tokens that a compiled constraint is followed for.
const NUM_TOKENS: usize = 16;
const END: TokenId = 256;

/// Compiles, and takes the first token that each mask allows.
fn follow(input: &[u8], constraint: impl Fn(String) -> Constraint) -> bool {
    let Ok(text) = String::from_utf8(input.to_vec()) else {
        return false;
    };
    let limits = Limits::default();
    let Ok(grammar) = compile(
        vocabulary(),
        &constraint(text),
        0,
        &limits,
        &Cancel::default(),
    ) else {
        return false;
    };
    let mut matcher = grammar.matcher();
    for _ in 0..NUM_TOKENS {
        let mut mask = vec![0_u32; vocabulary().num_mask_words()];
        let first = match matcher.allowed(&mut mask) {
            Ok(Allowed::All) => Some(u32::from(b'a')),
            Ok(_) => first_of(&mask),
            Err(_) => None,
        };
        let Some(token) = first.filter(|it| *it != END && !matcher.is_over()) else {
            break;
        };
        if matcher.accept(token).is_err() {
            break;
        }
    }
    true
}

fn first_of(mask: &[u32]) -> Option<TokenId> {
    (0..)
        .zip(mask)
        .find_map(|(word, bits): (u32, _)| (*bits != 0).then(|| word * 32 + bits.trailing_zeros()))
}

/// All bytes, and an end.
fn vocabulary() -> &'static Arc<Vocabulary> {
    static VOCABULARY: OnceLock<Arc<Vocabulary>> = OnceLock::new();
    VOCABULARY.get_or_init(|| {
        let bytes: Vec<[u8; 1]> = (0..=u8::MAX).map(|byte| [byte]).collect();
        let tokens = bytes.iter().map(|byte| Token::Text(byte));
        let tokens = tokens.chain([Token::Special(b"<|end|>")]);
        Arc::new(Vocabulary::new(tokens, &[END]).expect("bytes are a vocabulary"))
    })
}
