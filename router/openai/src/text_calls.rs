//! Calls that need the tokenizer and the template, and no token of the model.

use plait_core::TokenId;
use plait_text::ModelText;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

use crate::error::RequestError;
use crate::error_words::in_words_of;
use crate::json::append;
use crate::limits::{self, MAX_DETOKENISED_BYTES, MAX_TRUNCATED};
use crate::prepare::calls_of;
use crate::prompt_encoder::{PromptEncoder, check_ids};
use crate::request::{Input, PromptFields, Protocol};

/// One such call: the mirror of `plait.http.text_calls`.
#[derive(Clone, Debug, Deserialize, PartialEq)]
#[serde(tag = "call", rename_all = "snake_case")]
pub enum TextCall {
    /// `/tokenize`.
    Tokenize {
        /// A chat, or one prompt.
        #[serde(flatten)]
        input: Input,
        /// As in requests; None: in completions.
        #[serde(default)]
        add_special_tokens: Option<bool>,
        /// Tokens by their names, too.
        #[serde(default)]
        return_token_strs: bool,
    },
    /// `/v1/responses/input_tokens` and `/v1/messages/count_tokens`.
    CountTokens {
        /// A chat.
        #[serde(flatten)]
        input: Input,
    },
    /// `/detokenize`.
    Detokenize {
        /// As the client wrote them.
        tokens: Vec<i64>,
    },
    /// `/tokenizer_info`.
    TokenizerInfo,
}

/// vLLM's answer to `/tokenize`.
#[derive(Serialize)]
struct Tokenised<'a> {
    count: usize,
    max_model_len: u32,
    tokens: &'a [TokenId],
    token_strs: Option<Vec<String>>,
}

/// The answer's JSON. Errors name the field, what was given, what is allowed and what to do.
pub fn answer_text_call(
    model: &ModelText,
    call: &TextCall,
    max_model_len: u32,
) -> Result<Vec<u8>, RequestError> {
    let mut out = Vec::new();
    match call {
        TextCall::Tokenize {
            input,
            add_special_tokens,
            return_token_strs,
        } => {
            let tokens = tokenise(model, input, *add_special_tokens, max_model_len)?;
            let names = tokens.iter().map(|id| model.token_name(*id));
            let answer = Tokenised {
                count: tokens.len(),
                max_model_len,
                tokens: &tokens,
                token_strs: return_token_strs.then(|| names.collect()),
            };
            append(&answer, &mut out);
        }
        TextCall::CountTokens { input } => {
            let num_tokens = tokenise(model, input, None, max_model_len)?.len();
            append(&count(input, num_tokens), &mut out);
        }
        TextCall::Detokenize { tokens } => {
            let text = detokenise(model, tokens, max_model_len)?;
            append(&json!({"prompt": text}), &mut out);
        }
        TextCall::TokenizerInfo => append(&info(model, max_model_len), &mut out),
    }
    Ok(out)
}

/// A prompt may have some contexts' worth of tokens: who counts may want to know how many are too many.
fn tokenise(
    model: &ModelText,
    input: &Input,
    add_special_tokens: Option<bool>,
    max_model_len: u32,
) -> Result<Vec<TokenId>, RequestError> {
    let in_its_words = |error| in_words_of(input, error);
    limits::check_input(input).map_err(in_its_words)?;
    calls_of(model, input).map_err(in_its_words)?;
    let fields = PromptFields {
        add_special_tokens,
        ..PromptFields::default()
    };
    let encoder = PromptEncoder::counting(model, fields, max_model_len);
    let prompts = encoder.tokenise(input).map_err(in_its_words)?;
    let tokens = prompts.iter().flat_map(|it| it.tokens.iter().copied());
    Ok(tokens.collect())
}

fn count(input: &Input, num_tokens: usize) -> Value {
    match input {
        Input::Chat {
            protocol: Protocol::Responses { .. },
            ..
        } => json!({"object": "response.input_tokens", "input_tokens": num_tokens}),
        Input::Chat { .. } | Input::Completion { .. } => json!({"input_tokens": num_tokens}),
    }
}

fn detokenise(
    model: &ModelText,
    tokens: &[i64],
    max_model_len: u32,
) -> Result<String, RequestError> {
    let most = MAX_TRUNCATED * max_model_len as usize;
    if tokens.len() > most {
        let message = format!(
            "`tokens` has {} ids, where 0 to {most} are allowed; send them in several calls",
            tokens.len()
        );
        return Err(RequestError::invalid("tokens", message));
    }
    let tokens = check_ids(model, "tokens", tokens)?;
    let vocabulary = model.vocabulary();
    let num_bytes: usize = tokens
        .iter()
        .map(|id| vocabulary.piece(*id).bytes.len())
        .sum();
    if num_bytes > MAX_DETOKENISED_BYTES {
        let message = format!(
            "`tokens` are {num_bytes} bytes of text, where 0 to {MAX_DETOKENISED_BYTES} are allowed; send them in several \
             calls"
        );
        return Err(RequestError::invalid("tokens", message));
    }
    Ok(model.decode(&tokens))
}

/// What evaluation harnesses read in place of a tokenizer's files.
fn info(model: &ModelText, max_model_len: u32) -> Value {
    let mut info = Map::from_iter([
        ("model_max_length".to_owned(), max_model_len.into()),
        ("vocab_size".to_owned(), model.vocab_size().into()),
        (
            "chat_template".to_owned(),
            model.template_source().map_or(Value::Null, Value::from),
        ),
    ]);
    for (name, token) in model.special_tokens() {
        info.insert(name.to_owned(), token.map_or(Value::Null, Value::from));
    }
    Value::Object(info)
}
