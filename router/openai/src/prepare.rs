//! A request on its way in: checked, rendered, tokenised.

use std::num::NonZeroU32;
use std::sync::Arc;

use plait_core::{PooledTokens, Request, TenantId, TokenId};
use plait_grammar::Grammar;
use plait_proto::{Adjustment, Pooling, SamplingParams};
use plait_text::{ModelText, Parsing, ReasoningFormat, TextStyle, ToolFormat, Tools};

use crate::adjust;
use crate::answer_parts::{self, CallRules};
use crate::choice_seed::choice_seed;
use crate::choice_state::{ChoiceState, ResponseContext};
use crate::choices::Choices;
use crate::constraint::{AnswerForm, AskedConstraint};
use crate::error::{ApiError, RequestError};
use crate::error_words::{in_words_of, in_words_of_embeddings};
use crate::limits::{self, Numbers};
use crate::logprobs_budget::LogprobsBudget;
use crate::prompt_encoder::{PromptEncoder, Tokenised, Tokens, check_ids, prompt_param};
use crate::renderer::renderer_of;
use crate::request::{GenerateRequest, Input, Protocol, StopFields};
use crate::response_writer::ResponseWriter;
use crate::tools::{ThoughtPlace, ToolMode};

/// What OpenAI gives a completion that does not say.
const COMPLETION_TOKENS: u32 = 16;

/// A family's way of calling, and the tools that may be called.
pub(crate) type FoundCalls = Option<(&'static ToolFormat, Arc<Tools>)>;

/// In an answer's JSON, with its comma, at most for the vocabularies that there are.
const BYTES_OF_ID: usize = 8;

/// A request ready for the scheduler, and what will write its answer.
#[derive(Debug)]
pub struct Prepared {
    /// The prompts in order. Choice i of prompt p is the answer's choice p x n + i.
    pub prompts: Vec<PreparedPrompt>,
    /// Turns the choices' tokens into bytes.
    pub response: ResponseWriter,
    /// What the answers must be; [`Prepared::constrain`] takes its grammar.
    pub constraint: Option<AskedConstraint>,
    /// Log-probabilities of prompt tokens that the answer will hold.
    num_prompt_logprobs: usize,
}

impl Prepared {
    /// Every choice follows the compiled constraint; those of a request that samples nothing have nothing to follow.
    pub fn constrain(&mut self, grammar: &Grammar) {
        let thought = self.constraint.take().and_then(|asked| asked.thought);
        let grammar = thought.map_or_else(|| grammar.clone(), |end| grammar.behind_thought(end));
        let masked = self.prompts.iter_mut().filter(|it| it.request.is_masked);
        for choice in masked.flat_map(|prompt| &mut prompt.choices) {
            choice.grammar = Some(grammar.clone());
        }
    }

    /// Takes the answer's share of `budget` until it is written; an error (429) if too much is under way.
    pub fn reserve(&mut self, budget: &LogprobsBudget) -> Result<(), ApiError> {
        if self.num_prompt_logprobs == 0 {
            return Ok(());
        }
        self.response.reservation = budget.reserve(self.num_prompt_logprobs);
        if self.response.reservation.is_some() {
            return Ok(());
        }
        Err(ApiError::overloaded(format!(
            "the request asks for {} log-probabilities of its prompts, and the answers under way hold as many as may be \
             held at a time; try again later, or ask for fewer",
            self.num_prompt_logprobs
        )))
    }
}

/// A prompt and the answers to it.
#[derive(Clone, Debug, PartialEq)]
pub struct PreparedPrompt {
    /// For the scheduler.
    pub request: Request,
    /// As many as the request has, in order.
    pub choices: Vec<PreparedChoice>,
}

/// How a prompt's hidden states become its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pooled {
    /// One vector of all.
    pub pooling: Pooling,
    /// Elements that the answer has at most.
    pub dimensions: Option<u32>,
}

/// Elements of most models' vectors: so many slots enter at a time that their vectors fit a result.
const POOLED_WORDS: u32 = 8192;

/// One choice of an answer.
#[derive(Clone, Debug, PartialEq)]
pub struct PreparedChoice {
    /// For the worker.
    pub sampling: SamplingParams,
    /// For the worker: what it changes about the logits, if anything.
    pub adjustment: Option<Arc<Adjustment>>,
    /// For the worker: tokens whose log-probabilities come besides the best ones'.
    pub scored_ids: Arc<[TokenId]>,
    /// For the worker: how the hidden states of its prompt are pooled, if they are.
    pub pooled: Option<Pooled>,
    /// What its answer must be, if anything.
    pub grammar: Option<Grammar>,
}

/// Checks, renders and tokenises a request; `random_seed` gives one to each choice of a request without.
///
/// Prompt and `max_tokens` must fit into `max_model_len`. Nothing is tokenised that is so long that it
/// cannot fit, and no constraint is compiled: that may take longest. Errors name the field, what was given, what is allowed and what to do.
pub fn prepare(
    model: &ModelText,
    request: &GenerateRequest,
    max_model_len: u32,
    random_seed: &mut impl FnMut() -> u64,
) -> Result<Prepared, RequestError> {
    let prepared = prepare_chat_or_completion(model, request, max_model_len, random_seed);
    prepared.map_err(|error| match request.report.embedding {
        Some(_) => in_words_of_embeddings(&error),
        None => in_words_of(&request.input, error),
    })
}

fn prepare_chat_or_completion(
    model: &ModelText,
    request: &GenerateRequest,
    max_model_len: u32,
    random_seed: &mut impl FnMut() -> u64,
) -> Result<Prepared, RequestError> {
    // budget: one line for each field that a prompt and its choices have
    let numbers = limits::check(request)?;
    let calls = calls_of(model, &request.input)?;
    let stop_ids = stop_ids(model, &request.end)?;
    limits::check_min_tokens(&numbers, max_tokens(&request.input, &numbers))?;
    let adjustment = adjust::adjustment(model, request, &numbers, &stop_ids)?;
    let scored_ids = scored_ids(model, request, &numbers)?;
    let num_scored = u32::try_from(scored_ids.len()).unwrap_or(u32::MAX);
    let encoder = PromptEncoder::new(model, request, &numbers, max_model_len);
    let prompts = encoder.tokenise(&request.input)?;
    for (index, prompt) in prompts.iter().enumerate() {
        let param = prompt_param(&request.input, index);
        limits::check_length(&param, prompt.tokens.len(), &numbers, max_model_len)?;
    }
    let num_tokens = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
    let of_prompts = numbers.of_prompts(&request.input);
    let num_times = times_told(&request.input, &numbers);
    let num_prompt_logprobs = limits::check_prompt_logprobs(num_tokens, num_times, of_prompts)?;
    limits::check_repeated(num_repeated_bytes(request, &prompts), &numbers)?;
    let (_, prompt_logprobs) = of_prompts;
    let pooled = limits::check_embedding(request.report.embedding)?;
    let constraint = asked_constraint(model, request, calls.as_ref(), &prompts)?;
    let is_masked = constraint.is_some() && max_tokens(&request.input, &numbers) > 0;
    let prepared = prompts.iter().map(|prompt| {
        let adjustment = adjustment
            .as_ref()
            .map(|asked| adjust::of_prompt(asked, &prompt.tokens));
        let defaults = model.generation_defaults();
        let choices = (0..numbers.num_choices.get()).map(|choice| PreparedChoice {
            sampling: SamplingParams {
                seed: request.choices.seed.map_or_else(&mut *random_seed, |seed| {
                    choice_seed(seed.cast_unsigned(), choice)
                }),
                logprobs: numbers.logprobs.map(|num| num + num_scored),
                // The first choice's rows compute the prompt.
                prompt_logprobs: prompt_logprobs.filter(|_| choice == 0),
                ..request.sampling.or(defaults)
            },
            adjustment: adjustment.clone(),
            scored_ids: scored_ids.clone(),
            pooled,
            grammar: None,
        });
        PreparedPrompt {
            choices: choices.collect(),
            request: Request {
                prompt: prompt.tokens.clone(),
                max_tokens: max_tokens(&request.input, &numbers),
                stop_ids: stop_ids.clone(),
                num_choices: numbers.num_choices,
                prompt_logprobs: prompt_logprobs.is_some(),
                pooled: pooled.map(|it| pooled_tokens(it.pooling)),
                is_masked,
                num_slot_words: num_words(pooled, adjustment.as_deref()),
                priority: numbers.priority,
                tenant: TenantId(request.client.tenant),
                weight: request.client.weight.unwrap_or(NonZeroU32::MIN),
                salt: request.client.salt,
            },
        }
    });
    Ok(Prepared {
        prompts: prepared.collect(),
        response: response_writer(model, request, &prompts, (&numbers, calls)),
        constraint,
        num_prompt_logprobs,
    })
}

/// How often the answer tells of each prompt's log-probabilities: a chat once, a completion in each choice.
fn times_told(input: &Input, numbers: &Numbers) -> usize {
    match input {
        Input::Chat { .. } => 1,
        Input::Completion { .. } => numbers.num_choices.get() as usize,
    }
}

/// Bytes of the prompts that each choice tells: their texts, and their ids, which a whole chat tells once.
fn num_repeated_bytes(request: &GenerateRequest, prompts: &[Tokenised]) -> usize {
    let has_ids = request.stream || matches!(request.input, Input::Completion { .. });
    let bytes_of_id = match request.report.return_token_ids && has_ids {
        true => BYTES_OF_ID,
        false => 0,
    };
    let each = prompts.iter().map(|prompt| {
        prompt.echo.as_ref().map_or(0, |text| text.len()) + prompt.tokens.len() * bytes_of_id
    });
    each.sum()
}

fn pooled_tokens(pooling: Pooling) -> PooledTokens {
    match pooling {
        Pooling::Last => PooledTokens::Last,
        Pooling::Mean => PooledTokens::All,
    }
}

/// Words that enter or leave with a slot.
fn num_words(pooled: Option<Pooled>, adjustment: Option<&Adjustment>) -> u32 {
    let of_adjustment = adjustment.map_or(0, Adjustment::num_words);
    pooled.map_or_else(
        || u32::try_from(of_adjustment).unwrap_or(u32::MAX),
        |_| POOLED_WORDS,
    )
}

/// How the answer's calls are found, if it may have some.
pub(crate) fn calls_of(model: &ModelText, input: &Input) -> Result<FoundCalls, RequestError> {
    match input {
        Input::Chat { tools, .. } => tools.parsed_as(model.formats()),
        Input::Completion { .. } => Ok(None),
    }
}

/// What the answer must be, if anything.
fn asked_constraint(
    model: &ModelText,
    request: &GenerateRequest,
    calls: Option<&(&'static ToolFormat, Arc<Tools>)>,
    prompts: &[Tokenised],
) -> Result<Option<AskedConstraint>, RequestError> {
    let form = AnswerForm {
        calls: calls.map(|(format, tools)| (*format, &**tools)),
        reasoning: reasoning_of(model, &request.input),
        thought: thought_of(&request.input, prompts),
        thinking_token_budget: thinking_token_budget(model, request)?,
    };
    AskedConstraint::of_request(request, &form)
}

/// How thoughts are found in the answer, if they are.
fn reasoning_of(model: &ModelText, input: &Input) -> Option<&'static ReasoningFormat> {
    let is_chat = matches!(input, Input::Chat { .. });
    model.formats().reasoning.filter(|_| is_chat)
}

/// A model that is told not to think begins no thought before what it is held to.
fn thought_of(input: &Input, prompts: &[Tokenised]) -> ThoughtPlace {
    let is_off =
        matches!(input, Input::Chat { reasoning_effort: Some(effort), .. } if effort == "none");
    match prompts
        .first()
        .map_or(ThoughtPlace::Nowhere, |it| it.thought)
    {
        ThoughtPlace::First if is_off => ThoughtPlace::Nowhere,
        place => place,
    }
}

fn thinking_token_budget(
    model: &ModelText,
    request: &GenerateRequest,
) -> Result<Option<u32>, RequestError> {
    let budget = limits::check_thinking_token_budget(request.logits.thinking_token_budget)?;
    let is_message = matches!(
        &request.input,
        Input::Chat {
            protocol: Protocol::Messages,
            ..
        }
    );
    if is_message && model.formats().reasoning.is_none() {
        // Its clients budget thoughts without knowing the model, and one without thoughts keeps to any budget.
        return Ok(None);
    }
    if budget.is_some() && model.formats().reasoning.is_none() {
        let message = "`thinking_token_budget` is given, and this model's chat template shows no thoughts; leave it out, or \
                       start the server with --reasoning-parser";
        return Err(RequestError::new(
            "thinking_token_budget",
            "unsupported_value",
            message,
        ));
    }
    Ok(budget)
}

fn call_rules(request: &GenerateRequest, calls: &FoundCalls) -> CallRules {
    match (&request.input, calls) {
        (Input::Chat { tools, .. }, Some((format, _))) => CallRules {
            is_single: tools.end_after_one(),
            is_named: tools.tool_choice.mode == ToolMode::Named,
            are_functions: tools.are_functions,
            ids: Some(format.ids),
            id_seed: answer_parts::id_seed(&request.id),
        },
        _ => CallRules::default(),
    }
}

fn response_writer(
    model: &ModelText,
    request: &GenerateRequest,
    prompts: &[Tokenised],
    (numbers, calls): (&Numbers, FoundCalls),
) -> ResponseWriter {
    let reasoning = reasoning_of(model, &request.input);
    let context = ResponseContext {
        vocabulary: model.vocabulary().clone(),
        eos_token_ids: model.eos_token_ids().clone(),
        stops: request.end.stop.clone(),
        echo: request.input.is_echoed(),
        min_tokens: numbers.min_tokens,
        report: request.report,
        calls: call_rules(request, &calls),
        finds_thoughts: reasoning.is_some(),
        tells_cached: request.prompt_tokens_details,
    };
    let outputs = prompts.iter().flat_map(|prompt| {
        let style = TextStyle {
            start: prompt.start,
            skips_special: request.report.skip_special_tokens,
            shows_stop: request.report.include_stop_str_in_output,
        };
        let parsing = Parsing {
            reasoning,
            starts_in_thought: prompt.thought == ThoughtPlace::Open,
            tools: calls.clone(),
        };
        (0..numbers.num_choices.get())
            .map(move |_| (prompt, model.output_text(style, parsing.clone())))
    });
    let choices = outputs.enumerate().map(|(index, (prompt, output))| {
        let (tokens, echo) = (&prompt.tokens, &prompt.echo);
        ChoiceState::new(tokens.clone(), echo.clone(), (index, output))
    });
    let choices = Choices::new(&context, choices.collect(), numbers.num_choices);
    ResponseWriter::new(renderer_of(request), context, choices)
}

/// Each once, in the client's order.
fn scored_ids(
    model: &ModelText,
    request: &GenerateRequest,
    numbers: &Numbers,
) -> Result<Tokens, RequestError> {
    let mut ids = Vec::new();
    if numbers.logprobs.is_some() {
        let asked = &request.logits.logprob_token_ids;
        for &id in check_ids(model, "logprob_token_ids", asked)?.iter() {
            if !ids.contains(&id) {
                ids.push(id);
            }
        }
    }
    Ok(ids.into())
}

fn stop_ids(model: &ModelText, end: &StopFields) -> Result<Tokens, RequestError> {
    let own: &[TokenId] = match end.ignore_eos {
        true => &[],
        false => model.eos_token_ids(),
    };
    let asked = check_ids(model, "stop_token_ids", &end.stop_token_ids)?;
    let others = asked.iter().filter(|id| !own.contains(id));
    Ok(own.iter().chain(others).copied().collect())
}

fn max_tokens(input: &Input, numbers: &Numbers) -> u32 {
    let default = match input {
        // The scheduler caps it by what the context has left.
        Input::Chat { .. } => u32::MAX,
        Input::Completion { .. } => COMPLETION_TOKENS,
    };
    numbers.max_tokens.unwrap_or(default)
}
