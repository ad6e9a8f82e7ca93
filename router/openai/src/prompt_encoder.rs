//! From messages, texts and ids to a prompt's tokens.

use std::borrow::Cow;
use std::fmt::Display;
use std::ops::Range;
use std::sync::Arc;

use plait_core::TokenId;
use plait_text::{Chat, Message, ModelText, PieceKind, RenderError, TextStart};

use crate::error::RequestError;
use crate::limits::{self, MAX_TRUNCATED, Numbers, Truncation};
use crate::request::{GenerateRequest, Input, Prompt, PromptFields, TruncationSide};
use crate::tools::{self, ThoughtPlace};

/// A prompt in tokens.
pub(crate) type Tokens = Arc<[TokenId]>;

/// A prompt in tokens, and how its answer begins.
pub(crate) struct Tokenised {
    pub(crate) tokens: Tokens,
    pub(crate) start: TextStart,
    /// The prompt's text, if the answer repeats it.
    pub(crate) echo: Option<Arc<str>>,
    pub(crate) thought: ThoughtPlace,
}

/// Renders and tokenises the prompts of one request.
pub(crate) struct PromptEncoder<'a> {
    model: &'a ModelText,
    fields: PromptFields,
    /// Tokens that are kept of each prompt.
    num_kept: Option<usize>,
    max_model_len: u32,
}

impl<'a> PromptEncoder<'a> {
    pub(crate) fn new(
        model: &'a ModelText,
        request: &GenerateRequest,
        numbers: &Numbers,
        max_model_len: u32,
    ) -> Self {
        let num_output = numbers.max_tokens.unwrap_or(1);
        let room = max_model_len.saturating_sub(num_output) as usize;
        let num_kept = numbers.truncation.map(|truncation| match truncation {
            Truncation::To(num) => num,
            // Without room the prompt's length is refused, which says what is too much.
            Truncation::ToContext => room.max(1),
        });
        Self {
            model,
            fields: request.prompt,
            num_kept,
            max_model_len,
        }
    }

    /// For prompts that are counted and not answered: none is cut, and each may have some contexts' worth of tokens.
    pub(crate) fn counting(model: &'a ModelText, fields: PromptFields, max_model_len: u32) -> Self {
        Self {
            model,
            fields,
            num_kept: Some(usize::MAX),
            max_model_len,
        }
    }

    pub(crate) fn tokenise(&self, input: &Input) -> Result<Vec<Tokenised>, RequestError> {
        match input {
            Input::Chat {
                messages,
                chat_template_kwargs,
                add_generation_prompt,
                continue_final_message,
                reasoning_effort,
                documents,
                tools,
                ..
            } => {
                let prompt = self.tokenise_chat(Chat {
                    messages,
                    tools: &tools.offered(),
                    documents,
                    kwargs: chat_template_kwargs,
                    add_generation_prompt: *add_generation_prompt,
                    continue_final_message: *continue_final_message,
                    reasoning_effort: reasoning_effort.as_deref(),
                });
                Ok(vec![prompt?])
            }
            Input::Completion { prompts, echo } => {
                let prompts = prompts.iter().enumerate().map(|(index, prompt)| {
                    self.tokenise_completion(&prompt_param(input, index), prompt, *echo)
                });
                prompts.collect()
            }
        }
    }

    fn tokenise_chat(&self, chat: Chat<'_>) -> Result<Tokenised, RequestError> {
        let max_bytes = self.model.max_prompt_bytes(self.max_model_len);
        let text = self
            .model
            .render(chat, max_bytes)
            .map_err(|error| render_error(error, max_bytes, self.max_model_len))?;
        let continued = chat
            .continue_final_message
            .then(|| last_content(chat.messages));
        let reasoning = self.model.formats().reasoning;
        let thought = tools::thought_place(reasoning, &text, continued);
        // The template writes the beginning-of-text token itself.
        let tokens = self.encode("messages", &text, false)?;
        let start = match chat.continue_final_message {
            true => TextStart::Continued,
            false => TextStart::Fresh,
        };
        Ok(Tokenised {
            tokens,
            start,
            echo: None,
            thought,
        })
    }

    fn tokenise_completion(
        &self,
        param: &str,
        prompt: &Prompt,
        echo: bool,
    ) -> Result<Tokenised, RequestError> {
        let tokens: Tokens = match prompt {
            Prompt::Text(text) => {
                let max_bytes = self.model.max_prompt_bytes(self.max_model_len);
                if text.len() > max_bytes {
                    return Err(limits::too_many_bytes(param, max_bytes, self.max_model_len));
                }
                self.encode(param, text, true)?
            }
            Prompt::Tokens(ids) => self.truncated(check_ids(self.model, param, ids)?, 0..0),
        };
        let is_shown = |&id: &TokenId| self.model.vocabulary().piece(id).kind != PieceKind::Hidden;
        let start = if tokens.iter().any(is_shown) {
            TextStart::Continued
        } else {
            TextStart::Fresh
        };
        let echo = echo.then(|| match prompt {
            Prompt::Text(text) if self.num_kept.is_none() => text.as_str().into(),
            _ => self.model.decode(&tokens).into(),
        });
        Ok(Tokenised {
            tokens,
            start,
            echo,
            thought: ThoughtPlace::Nowhere,
        })
    }

    fn encode(&self, param: &str, text: &str, is_framed: bool) -> Result<Tokens, RequestError> {
        let is_framed = self.fields.add_special_tokens.unwrap_or(is_framed);
        let is_truncated = self.num_kept.is_some();
        let most = self.max_model_len as usize * if is_truncated { MAX_TRUNCATED } else { 1 };
        let tokens = self.model.encode(text, is_framed, most).map_err(|error| {
            limits::encode_error(param, error, self.max_model_len, is_truncated)
        })?;
        // A tokenizer may know tokens that the model's tables have no row for.
        let tokens = check_ids(self.model, param, &tokens)?;
        let [before, after] = self.model.special_frame();
        let text = match is_framed {
            true => before.len()..tokens.len() - after.len(),
            false => 0..tokens.len(),
        };
        Ok(self.truncated(tokens, text))
    }

    /// The tokens that are kept: those around the text, and of the text as many as fit.
    fn truncated(&self, tokens: Tokens, text: Range<usize>) -> Tokens {
        let Some(num_kept) = self.num_kept.filter(|num| *num < tokens.len()) else {
            return tokens;
        };
        let text = match text.is_empty() {
            true => 0..tokens.len(),
            false => text,
        };
        let num_around = tokens.len() - text.len();
        let (before, rest) = tokens.split_at(text.start);
        let (text, after) = rest.split_at(text.len());
        let num_kept = num_kept.saturating_sub(num_around);
        let kept = match self.fields.truncation_side {
            TruncationSide::Left => &text[text.len() - num_kept..],
            TruncationSide::Right => &text[..num_kept],
        };
        [before, kept, after].concat().into()
    }
}

fn last_content(messages: &[Message]) -> &str {
    let content = messages
        .last()
        .and_then(|message| message.get("content")?.as_str());
    content.unwrap_or_default()
}

/// The name of a prompt in errors: with its index where there are several.
pub(crate) fn prompt_param(input: &Input, index: usize) -> Cow<'static, str> {
    match input {
        Input::Chat { .. } => "messages".into(),
        Input::Completion { prompts, .. } if prompts.len() == 1 => "prompt".into(),
        Input::Completion { .. } => format!("prompt[{index}]").into(),
    }
}

/// The ids as the model's tables have them.
pub(crate) fn check_ids<Id: Copy + Display>(
    model: &ModelText,
    param: &str,
    ids: &[Id],
) -> Result<Tokens, RequestError>
where
    TokenId: TryFrom<Id>,
{
    let vocab_size = model.vocab_size();
    let checked = ids.iter().map(|&id| {
        let known = TokenId::try_from(id).ok().filter(|&it| it < vocab_size);
        known.ok_or(id)
    });
    checked.collect::<Result<_, _>>().map_err(|id| {
        let last = vocab_size - 1;
        let message = format!(
            "`{param}` has the token id {id}, where 0 to {last} are allowed; send ids of this model's tokenizer"
        );
        RequestError::invalid(param.to_owned(), message)
    })
}

fn render_error(error: RenderError, max_bytes: usize, max_model_len: u32) -> RequestError {
    match error {
        RenderError::NoTemplate => {
            let problem = "this model has no chat template; use /v1/completions";
            RequestError::new("messages", "no_chat_template", problem)
        }
        RenderError::LastMessageLost => {
            let problem = "`continue_final_message` is true, and this model's chat template does not show the last message \
                           as it was sent; leave the field out, or continue a text with /v1/completions";
            RequestError::invalid("continue_final_message", problem)
        }
        RenderError::TooLong => limits::too_many_bytes("messages", max_bytes, max_model_len),
        RenderError::Failed(sentence) => {
            let problem =
                format!("the chat template rejects these messages: {sentence}; send others");
            RequestError::new("messages", "chat_template_error", problem)
        }
    }
}
