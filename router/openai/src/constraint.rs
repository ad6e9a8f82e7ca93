//! What a request constrains its answer to: from the body's field to a compiled grammar.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use plait_core::TokenId;
use plait_grammar::{
    Cancel, CompileError, Constraint, Grammar, GrammarCache, Limits, ThoughtRule, Token,
    Vocabulary, Whitespace,
};
use plait_text::{ModelText, PieceKind, ReasoningFormat, ToolFormat, Tools};
use serde::Deserialize;

use crate::error::{ApiError, RequestError};
use crate::request::{GenerateRequest, Input};
use crate::tools::{ThoughtPlace, ToolFields};

/// Compiled grammars that are kept.
const CACHE_BYTES: usize = 256 << 20;
/// Retry-After where earlier compilations still take the threads.
const BUSY_SECONDS: u16 = 2;

/// The constraint of a request, and the field that the client used for it.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
pub struct ConstraintField {
    /// For errors.
    pub param: String,
    /// What the answer must be.
    #[serde(flatten)]
    pub value: ConstraintValue,
}

/// What an answer must be.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq)]
#[serde(tag = "constraint", rename_all = "snake_case")]
pub enum ConstraintValue {
    /// A JSON object.
    JsonObject,
    /// JSON that a schema validates.
    JsonSchema {
        /// The schema as the client wrote it.
        text: String,
        /// Without spaces.
        #[serde(default)]
        is_compact: bool,
        /// Which spaces it may have between JSON's tokens.
        #[serde(default)]
        whitespace_pattern: Option<String>,
    },
    /// What a regular expression matches as a whole.
    Regex {
        /// The expression.
        text: String,
    },
    /// One of these texts.
    Choice {
        /// The texts.
        texts: Vec<String>,
    },
    /// What a grammar produces.
    Grammar {
        /// EBNF or Lark.
        text: String,
    },
    /// Text with tagged parts.
    StructuralTag {
        /// The tag's JSON as the client wrote it.
        text: String,
    },
}

impl ConstraintValue {
    fn constraint(&self) -> Constraint {
        match self.clone() {
            Self::JsonObject => Constraint::JsonObject,
            Self::JsonSchema {
                text,
                is_compact,
                whitespace_pattern,
            } => {
                let whitespace = match (is_compact, whitespace_pattern) {
                    (true, _) => Whitespace::None,
                    (false, Some(pattern)) => Whitespace::Pattern(pattern),
                    (false, None) => Whitespace::Free,
                };
                Constraint::JsonSchema(text, whitespace)
            }
            Self::Regex { text } => Constraint::Regex(text),
            Self::Choice { texts } => Constraint::Choice(texts),
            Self::Grammar { text } => Constraint::Ebnf(text),
            Self::StructuralTag { text } => Constraint::StructuralTag(text),
        }
    }
}

/// What a request's answers must be. Its grammar is still to be compiled, which may take seconds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AskedConstraint {
    /// The client's field, for errors.
    pub param: String,
    /// What an answer must be.
    pub constraint: Constraint,
    /// The answer begins behind this thought.
    pub thought: Option<ThoughtRule>,
}

/// What is known of an answer's form before it is constrained.
pub(crate) struct AnswerForm<'a> {
    pub(crate) calls: Option<(&'static ToolFormat, &'a Tools)>,
    pub(crate) reasoning: Option<&'static ReasoningFormat>,
    pub(crate) thought: ThoughtPlace,
    pub(crate) thinking_token_budget: Option<u32>,
}

impl AnswerForm<'_> {
    /// The thought before the answer, if there may be one.
    fn thought(&self) -> Option<ThoughtRule> {
        let format = self.reasoning?;
        let open = match self.thought {
            ThoughtPlace::Nowhere => return None,
            ThoughtPlace::Open => None,
            ThoughtPlace::First => Some(format.open.to_owned()),
        };
        Some(ThoughtRule {
            open,
            close: format.close.to_owned(),
            max_tokens: self.thinking_token_budget,
        })
    }
}

impl AskedConstraint {
    /// The request's, if it has one that goes with its other fields.
    pub(crate) fn of_request(
        request: &GenerateRequest,
        form: &AnswerForm<'_>,
    ) -> Result<Option<Self>, RequestError> {
        let thought = form.thought();
        let Some((param, constraint)) = asked(request, form)? else {
            return of_budget(request, thought);
        };
        check_company(request, &param)?;
        Ok(Some(Self {
            param,
            constraint,
            thought,
        }))
    }

    /// What the client reads whose constraint has no grammar.
    pub fn refusal(&self, error: &CompileError) -> ApiError {
        let code = match error {
            CompileError::Busy => {
                let message = format!("`{}` {error}", self.param);
                return ApiError::overloaded(message).retry_after(BUSY_SECONDS);
            }
            CompileError::Cancelled => {
                return ApiError::unavailable("the server was stopped");
            }
            CompileError::TooLarge { .. }
            | CompileError::TooComplex(_)
            | CompileError::TooSlow(_) => "constraint_too_large",
            CompileError::Unsupported { .. } => "unsupported_value",
            CompileError::Malformed(_) | CompileError::Empty(_) | CompileError::Endless(_) => {
                "invalid_value"
            }
        };
        let message = format!("`{}` {error}", self.param);
        RequestError::new(self.param.clone(), code, message).into()
    }
}

/// What the answer must be, and the field that says so.
fn asked(
    request: &GenerateRequest,
    form: &AnswerForm<'_>,
) -> Result<Option<(String, Constraint)>, RequestError> {
    let calls = match (&request.input, form.calls) {
        (Input::Chat { tools, .. }, Some((format, callable))) => Some((tools, format, callable)),
        _ => None,
    };
    match (&request.logits.constraint, calls) {
        (Some(field), None) => Ok(Some((field.param.clone(), field.value.constraint()))),
        (Some(field), Some((tools, ..))) => Err(beside_tools(&field.param, tools)),
        (None, None) => Ok(None),
        (None, Some((tools, format, callable))) => {
            let held = tools.held_to(format, callable)?;
            Ok(held.map(|form| (tools.param().to_owned(), Constraint::Calls(form))))
        }
    }
}

fn beside_tools(param: &str, tools: &ToolFields) -> RequestError {
    let tools = tools.param();
    let message = format!(
        "`{param}` is given beside `{tools}`, and no answer is held to both; leave one out, or send `tool_choice`: \
         \"none\""
    );
    RequestError::invalid(param.to_owned(), message)
}

/// An answer of which nothing but the thought's length is constrained.
fn of_budget(
    request: &GenerateRequest,
    thought: Option<ThoughtRule>,
) -> Result<Option<AskedConstraint>, RequestError> {
    let Some(thought) = thought.filter(|it| it.max_tokens.is_some()) else {
        return Ok(None);
    };
    let param = "thinking_token_budget";
    check_closing(request, param, &["allowed_token_ids", "bad_words"])?;
    Ok(Some(AskedConstraint {
        param: param.to_owned(),
        constraint: Constraint::Free,
        thought: Some(thought),
    }))
}

/// How a constraint became a grammar.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GrammarOutcome {
    /// It was compiled in this time.
    Compiled(Duration),
    /// It was compiled before.
    Cached,
    /// It has none.
    Refused,
}

/// Told what became of a constraint of this kind.
type Observer = Box<dyn Fn(&'static str, GrammarOutcome) + Send + Sync>;

/// Compiles the constraints of one model's requests.
pub struct Grammars {
    /// Made for the first constraint.
    vocabulary: OnceLock<Result<Arc<Vocabulary>, String>>,
    cache: GrammarCache,
    limits: Limits,
    /// Ends compilations that nobody will wait for.
    cancel: Cancel,
    observer: Observer,
}

impl Grammars {
    /// None yet.
    pub fn new(observer: impl Fn(&'static str, GrammarOutcome) + Send + Sync + 'static) -> Self {
        Self {
            vocabulary: OnceLock::new(),
            cache: GrammarCache::new(CACHE_BYTES),
            limits: Limits::default(),
            cancel: Cancel::default(),
            observer: Box::new(observer),
        }
    }

    /// The server stops: compilations under way end.
    pub fn close(&self) {
        self.cancel.cancel();
    }

    /// A constraint's grammar, or why it has none, if that is known. Never compiles.
    pub fn known(&self, constraint: &Constraint) -> Option<Result<Grammar, CompileError>> {
        let known = self.cache.known(constraint, &self.limits)?;
        let outcome = match known {
            Ok(_) => GrammarOutcome::Cached,
            Err(_) => GrammarOutcome::Refused,
        };
        (self.observer)(constraint.kind(), outcome);
        Some(known)
    }

    /// A constraint's grammar, from the cache or compiled now for this tenant. May take seconds.
    pub fn compile(
        &self,
        model: &ModelText,
        constraint: &Constraint,
        tenant: u64,
    ) -> Result<Grammar, CompileError> {
        let start = Instant::now();
        let vocabulary = self.vocabulary.get_or_init(|| vocabulary(model));
        let vocabulary = vocabulary.as_ref().map_err(|problem| {
            CompileError::TooComplex(format!(
                "with this model no answer can be constrained: {problem}"
            ))
        })?;
        let compiled = self
            .cache
            .get(vocabulary, constraint, tenant, &self.limits, &self.cancel);
        let outcome = match compiled {
            (Ok(_), true) => GrammarOutcome::Cached,
            (Ok(_), false) => GrammarOutcome::Compiled(start.elapsed()),
            // Another try may compile it.
            (Err(CompileError::Busy | CompileError::Cancelled), _) => return compiled.0,
            (Err(_), _) => GrammarOutcome::Refused,
        };
        (self.observer)(constraint.kind(), outcome);
        compiled.0
    }
}

impl std::fmt::Debug for Grammars {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Grammars")
            .field("cache", &self.cache)
            .finish_non_exhaustive()
    }
}

/// The model's tokens by the bytes that they add to a text.
fn vocabulary(model: &ModelText) -> Result<Arc<Vocabulary>, String> {
    let pieces = model.vocabulary();
    let tokens = (0..model.vocab_size()).map(|id: TokenId| {
        let piece = pieces.piece(id);
        match piece.kind {
            PieceKind::Hidden => Token::Special(piece.bytes),
            PieceKind::Text | PieceKind::Byte => Token::Text(piece.bytes),
        }
    });
    Vocabulary::new(tokens, model.eos_token_ids()).map(Arc::new)
}

/// What closes tokens on its own may leave a grammar without any.
fn check_company(request: &GenerateRequest, param: &str) -> Result<(), RequestError> {
    check_closing(
        request,
        param,
        &["min_tokens", "allowed_token_ids", "bad_words"],
    )
}

fn check_closing(
    request: &GenerateRequest,
    param: &str,
    fields: &[&'static str],
) -> Result<(), RequestError> {
    let logits = &request.logits;
    let is_given = |field: &&&'static str| match **field {
        "min_tokens" => request.end.min_tokens.is_some_and(|it| it > 0),
        "allowed_token_ids" => logits.allowed_token_ids.is_some(),
        _ => !logits.bad_words.is_empty(),
    };
    let Some(closing) = fields.iter().find(is_given) else {
        return Ok(());
    };
    let message = format!(
        "`{param}` and `{closing}` are both given, and together they may leave no token to answer with; leave one out"
    );
    Err(RequestError::invalid(*closing, message))
}
