//! A request as the front door hands it to the engine.

use std::sync::OnceLock;

use plait_openai::{GenerateRequest, Grammars, prepare};
use plait_text::ModelText;

use super::{Target, root};

const WORDS: &[&[u8]] = &[
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b"null",
    b"true",
    b"\"messages\"",
    b"\"role\"",
    b"\"content\"",
    b"\"prompts\"",
    b"\"stop\"",
    b"\"logit_bias\"",
    b"\"256\"",
    b"\"n\"",
    b"\"logprobs\"",
    b"\"prompt_logprobs\"",
    b"\"tools\"",
    b"\"tool_choice\"",
    b"\"constraint\"",
    b"\"json_schema\"",
    b"\"echo\"",
    b"\"min_tokens\"",
    b"\"bad_words\"",
    b"\"allowed_token_ids\"",
    b"\"truncate_prompt_tokens\"",
    b"\"continue_final_message\"",
    b"\"chat_template_kwargs\"",
];

const CONTEXT: u32 = 8192;

pub fn request() -> Target {
    Target {
        name: "request",
        words: WORDS,
        max_mib: 1024,
        num_reduced: 300,
        decode: prepare_request,
    }
}

fn prepare_request(input: &[u8]) -> bool {
    static MODEL: OnceLock<ModelText> = OnceLock::new();
    static GRAMMARS: OnceLock<Grammars> = OnceLock::new();
    let model = MODEL.get_or_init(|| {
        ModelText::load(&root().join("tests/models/recall-gqa"), None).expect("check models load")
    });
    let grammars = GRAMMARS.get_or_init(|| Grammars::new(|_, _| {}));
    let Ok(request) = serde_json::from_slice::<GenerateRequest>(input) else {
        return false;
    };
    let Ok(mut prepared) = prepare(model, &request, CONTEXT, &mut || 7) else {
        return false;
    };
    let Some(asked) = prepared.constraint.clone() else {
        return true;
    };
    let compiled = grammars.compile(model, &asked.constraint, 0);
    compiled.map(|grammar| prepared.constrain(&grammar)).is_ok()
}
