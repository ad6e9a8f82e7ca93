//! A request as the front door hands it to the engine.

use std::sync::OnceLock;

use plait_openai::{GenerateRequest, Grammars, TextCall, answer_text_call, prepare};
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

const TEXT_WORDS: &[&[u8]] = &[
    b"{",
    b"}",
    b"[",
    b"]",
    b":",
    b",",
    b"null",
    b"\"call\"",
    b"\"tokenize\"",
    b"\"detokenize\"",
    b"\"count_tokens\"",
    b"\"tokens\"",
    b"\"messages\"",
    b"\"protocol\"",
    b"4294967296",
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

/// A call that generates nothing.
pub fn text_call() -> Target {
    Target {
        name: "text_call",
        words: TEXT_WORDS,
        max_mib: 1024,
        num_reduced: 300,
        decode: answer_call,
    }
}

fn model() -> &'static ModelText {
    static MODEL: OnceLock<ModelText> = OnceLock::new();
    MODEL.get_or_init(|| {
        ModelText::load(&root().join("tests/models/recall-gqa"), None).expect("check models load")
    })
}

fn answer_call(input: &[u8]) -> bool {
    let call = serde_json::from_slice::<TextCall>(input);
    call.is_ok_and(|call| answer_text_call(model(), &call, CONTEXT).is_ok())
}

fn prepare_request(input: &[u8]) -> bool {
    static GRAMMARS: OnceLock<Grammars> = OnceLock::new();
    let model = model();
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
