//! A request on its way in: checked, rendered, tokenised.

use std::sync::Arc;

use plait_core::{Request, Sampling, TenantId, TokenId};

use super::choice::Rules;
use super::detokenise::TextStart;
use super::envelope::Envelope;
use super::error::RequestError;
use super::model::ModelText;
use super::request::{EndFields, GenerateRequest, Input, Prepared, Prompt, SamplingFields};
use super::stream::StreamText;
use super::template::{Chat, RenderError};
use super::vocabulary::PieceKind;

const MAX_MESSAGES: usize = 4096;
const MAX_PROMPTS: usize = 256;
const MAX_STOPS: usize = 16;
const MAX_STOP_BYTES: usize = 256;
const MAX_STOP_IDS: usize = 256;
const MAX_LOGPROBS: u8 = 20;
/// Log-probabilities of prompt tokens in one answer: each takes about 100 bytes of its JSON.
const MAX_PROMPT_LOGPROBS: usize = 1 << 22;
/// What OpenAI gives a completion that does not say.
const COMPLETION_TOKENS: u32 = 16;
/// A normaliser may shorten a text before it becomes tokens, by less than this.
const NORMALISER_SHRINKS: usize = 4;

/// A prompt in tokens.
type Tokens = Arc<[TokenId]>;

impl ModelText {
    /// Renders, tokenises and checks a request; `draw_seed` gives one to each choice that has none.
    ///
    /// Prompt and `max_tokens` must fit into `max_model_len`. Nothing is tokenised that is so long
    /// that it cannot fit. Errors name the field, what was given and what is allowed.
    pub fn prepare(
        &self,
        request: &GenerateRequest,
        max_model_len: u32,
        draw_seed: &mut impl FnMut() -> u64,
    ) -> Result<Prepared, RequestError> {
        self.check_end(&request.end)?;
        check_report(request)?;
        let prompts = self.prompts(&request.input, max_model_len)?;
        for (prompt, _) in &prompts {
            check_length(prompt.len(), &request.end, max_model_len)?;
        }
        check_prompt_logprobs(&prompts, request.report.prompt_logprobs)?;
        let stop_ids = self.stop_ids(&request.end);
        let choices = prompts.iter().map(|(prompt, _)| Request {
            prompt: prompt.clone(),
            max_tokens: max_tokens(request),
            stop_ids: stop_ids.clone(),
            sampling: self.sampling(request, draw_seed),
            priority: request.client.priority,
            tenant: TenantId(request.client.tenant),
            salt: request.client.salt,
        });
        let choices = choices.collect();
        let rules = Rules {
            vocabulary: self.vocabulary.clone(),
            eos_token_ids: self.eos_token_ids.clone(),
            stops: request.end.stop.clone(),
            report: request.report,
        };
        let stream = StreamText::new(rules, Envelope::new(request), prompts);
        Ok(Prepared { choices, stream })
    }

    fn prompts(
        &self,
        input: &Input,
        max_model_len: u32,
    ) -> Result<Vec<(Tokens, TextStart)>, RequestError> {
        match input {
            Input::Chat {
                messages,
                chat_template_kwargs,
                add_generation_prompt,
            } => {
                let chat = Chat {
                    messages,
                    kwargs: chat_template_kwargs,
                    add_generation_prompt: *add_generation_prompt,
                };
                let prompt = self.chat_prompt(chat, max_model_len)?;
                Ok(vec![(prompt, TextStart::Fresh)])
            }
            Input::Completion { prompts } => {
                check_count("prompt", "prompts", prompts.len(), 1, MAX_PROMPTS)?;
                let prompts = prompts
                    .iter()
                    .map(|it| self.completion_prompt(it, max_model_len));
                prompts.collect()
            }
        }
    }

    fn chat_prompt(&self, chat: Chat<'_>, max_model_len: u32) -> Result<Tokens, RequestError> {
        let text = self.render(chat, max_model_len)?;
        // The template has written the beginning-of-text token itself where there is one.
        Ok(self.tokenise("messages", &text, false)?.into())
    }

    fn render(&self, chat: Chat<'_>, max_model_len: u32) -> Result<String, RequestError> {
        check_count("messages", "messages", chat.messages.len(), 1, MAX_MESSAGES)?;
        let template = self.template.as_ref().ok_or_else(|| {
            let problem = "this model has no chat template; use /v1/completions";
            RequestError::new("messages", "no_chat_template", problem)
        })?;
        let max_bytes = self.max_prompt_bytes(max_model_len);
        let rendered = template.render(chat, max_bytes);
        rendered.map_err(|error| refusal(error, max_bytes, max_model_len))
    }

    fn completion_prompt(
        &self,
        prompt: &Prompt,
        max_model_len: u32,
    ) -> Result<(Tokens, TextStart), RequestError> {
        let tokens: Tokens = match prompt {
            Prompt::Text(text) => {
                let max_bytes = self.max_prompt_bytes(max_model_len);
                if text.len() > max_bytes {
                    return Err(too_many_bytes("prompt", max_bytes, max_model_len));
                }
                self.tokenise("prompt", text, true)?.into()
            }
            Prompt::Tokens(ids) => {
                self.check_ids("prompt", ids)?;
                ids.as_slice().into()
            }
        };
        let is_shown = |&id: &TokenId| self.vocabulary.piece(id).kind != PieceKind::Hidden;
        let start = if tokens.iter().any(is_shown) {
            TextStart::Continued
        } else {
            TextStart::Fresh
        };
        Ok((tokens, start))
    }

    fn tokenise(
        &self,
        param: &'static str,
        text: &str,
        add_special_tokens: bool,
    ) -> Result<Vec<TokenId>, RequestError> {
        let tokens = self
            .encode(text, add_special_tokens)
            .map_err(|problem| RequestError::invalid(param, format!("{param}: {problem}")))?;
        // A tokenizer may know tokens that the model's tables have no row for.
        self.check_ids(param, &tokens)?;
        Ok(tokens)
    }

    /// Bytes that no text exceeds whose tokens fit into the context.
    fn max_prompt_bytes(&self, max_model_len: u32) -> usize {
        let shrinks = match self.tokenizer.get_normalizer() {
            Some(_) => NORMALISER_SHRINKS,
            None => 1,
        };
        (max_model_len as usize)
            .saturating_mul(self.vocabulary.longest_piece())
            .saturating_mul(shrinks)
    }

    fn stop_ids(&self, end: &EndFields) -> Tokens {
        let own: &[TokenId] = match end.ignore_eos {
            true => &[],
            false => &self.eos_token_ids,
        };
        let asked = end.stop_token_ids.iter().filter(|id| !own.contains(id));
        own.iter().chain(asked).copied().collect()
    }

    fn sampling(&self, request: &GenerateRequest, draw_seed: &mut impl FnMut() -> u64) -> Sampling {
        let asked: &SamplingFields = &request.sampling;
        let defaults = self.generation_defaults();
        Sampling {
            temperature: asked.temperature.or(defaults.temperature).unwrap_or(1.0),
            top_k: asked.top_k.or(defaults.top_k).unwrap_or(0),
            top_p: asked.top_p.or(defaults.top_p).unwrap_or(1.0),
            min_p: asked.min_p.or(defaults.min_p).unwrap_or(0.0),
            seed: asked.seed.unwrap_or_else(draw_seed),
            logprobs: request.report.logprobs,
            prompt_logprobs: request.report.prompt_logprobs,
        }
    }

    fn check_end(&self, end: &EndFields) -> Result<(), RequestError> {
        check_count("stop", "stop strings", end.stop.len(), 0, MAX_STOPS)?;
        for stop in &end.stop {
            check_count(
                "stop",
                "bytes in a stop string",
                stop.len(),
                1,
                MAX_STOP_BYTES,
            )?;
        }
        let num_ids = end.stop_token_ids.len();
        check_count("stop_token_ids", "stop ids", num_ids, 0, MAX_STOP_IDS)?;
        self.check_ids("stop_token_ids", &end.stop_token_ids)
    }

    fn check_ids(&self, param: &'static str, ids: &[TokenId]) -> Result<(), RequestError> {
        let vocab_size = self.vocab_size();
        match ids.iter().find(|&&id| id >= vocab_size) {
            None => Ok(()),
            Some(id) => {
                let last = vocab_size - 1;
                let problem =
                    format!("{param}: token id {id} is not one; they go from 0 to {last}");
                Err(RequestError::invalid(param, problem))
            }
        }
    }
}

fn max_tokens(request: &GenerateRequest) -> u32 {
    let default = match request.input {
        // The scheduler caps it by what the context has left.
        Input::Chat { .. } => u32::MAX,
        Input::Completion { .. } => COMPLETION_TOKENS,
    };
    request.end.max_tokens.unwrap_or(default)
}

fn check_report(request: &GenerateRequest) -> Result<(), RequestError> {
    let report = request.report;
    let asked = [
        ("logprobs", report.logprobs),
        ("prompt_logprobs", report.prompt_logprobs),
    ];
    for (param, num) in asked {
        check_count(
            param,
            param,
            num.unwrap_or(0).into(),
            0,
            MAX_LOGPROBS.into(),
        )?;
    }
    if request.stream && report.prompt_logprobs.is_some() {
        let problem = "prompt_logprobs come with whole answers only; leave out stream";
        return Err(RequestError::invalid("prompt_logprobs", problem));
    }
    Ok(())
}

/// What is measured of all prompts together must fit one answer.
fn check_prompt_logprobs(
    prompts: &[(Tokens, TextStart)],
    num_top: Option<u8>,
) -> Result<(), RequestError> {
    let Some(num_top) = num_top else {
        return Ok(());
    };
    let num_tokens: usize = prompts.iter().map(|(prompt, _)| prompt.len()).sum();
    let given = num_tokens * (1 + usize::from(num_top));
    if given <= MAX_PROMPT_LOGPROBS {
        return Ok(());
    }
    let problem = format!(
        "prompt_logprobs: {num_top} beside each of {num_tokens} prompt tokens make {given} in one answer, where \
         {MAX_PROMPT_LOGPROBS} are allowed; ask for fewer, or send the prompts one by one"
    );
    Err(RequestError::invalid("prompt_logprobs", problem))
}

fn check_count(
    param: &'static str,
    what: &str,
    given: usize,
    least: usize,
    most: usize,
) -> Result<(), RequestError> {
    if (least..=most).contains(&given) {
        return Ok(());
    }
    let problem = format!("{param}: {given} {what}, where {least} to {most} are allowed");
    Err(RequestError::invalid(param, problem))
}

/// A prompt needs room for one token behind it, and for `max_tokens` where they were asked for.
fn check_length(
    num_prompt: usize,
    end: &EndFields,
    max_model_len: u32,
) -> Result<(), RequestError> {
    let num_output = end.max_tokens.unwrap_or(1) as usize;
    if num_prompt.saturating_add(num_output) <= max_model_len as usize {
        return Ok(());
    }
    let field = end.max_tokens_field.name();
    let problem = match end.max_tokens {
        Some(_) if num_prompt < max_model_len as usize => format!(
            "the prompt has {num_prompt} tokens and {field} is {num_output}, but the context \
             holds {max_model_len} in all; ask for at most {} or shorten the prompt",
            max_model_len as usize - num_prompt
        ),
        _ => format!(
            "the prompt has {num_prompt} tokens, the context holds {max_model_len}, and at least \
             one is for the answer; shorten the prompt"
        ),
    };
    let param = if num_prompt < max_model_len as usize {
        field
    } else {
        "prompt"
    };
    Err(RequestError::new(param, "context_length_exceeded", problem))
}

fn refusal(error: RenderError, max_bytes: usize, max_model_len: u32) -> RequestError {
    match error {
        RenderError::TooLong => too_many_bytes("messages", max_bytes, max_model_len),
        RenderError::Failed(sentence) => {
            let problem = format!("the chat template refuses these messages: {sentence}");
            RequestError::new("messages", "chat_template_error", problem)
        }
        RenderError::Reserved(name) => {
            let problem =
                format!("chat_template_kwargs: `{name}` is set by the server; leave it out");
            RequestError::invalid("chat_template_kwargs", problem)
        }
    }
}

fn too_many_bytes(param: &'static str, max_bytes: usize, max_model_len: u32) -> RequestError {
    let problem = format!(
        "the text has more than {max_bytes} bytes, so it cannot fit into a context of \
         {max_model_len} tokens; shorten it"
    );
    RequestError::new(param, "context_length_exceeded", problem)
}
