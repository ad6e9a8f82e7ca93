//! What a request may ask for, and the library's words for it.

use llguidance::api::{GrammarWithLexer, TopLevelGrammar};
use serde_json::{Value, json};

use crate::ebnf;
use crate::error::CompileError;
use crate::form::Form;
use crate::limits::Limits;
use crate::schema;
use crate::structural_tag::Tags;
use crate::vocabulary::Vocabulary;
use crate::whitespace::Whitespace;

/// What an answer must be. Equal ones share a compiled grammar.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Constraint {
    /// A JSON object.
    JsonObject,
    /// JSON that this schema, itself JSON, validates.
    JsonSchema(String, Whitespace),
    /// A text that this regular expression matches as a whole.
    Regex(String),
    /// One of these texts.
    Choice(Vec<String>),
    /// A text of this grammar: GBNF (`root ::= ...`), else Lark.
    Ebnf(String),
    /// Text with tagged parts, as JSON says.
    StructuralTag(String),
    /// Tool calls in their family's marks.
    Calls(Form),
    /// Any text. For an answer of which only the thought is bounded.
    Free,
}

impl Constraint {
    /// A word for counters.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::JsonObject => "json_object",
            Self::JsonSchema(..) => "json_schema",
            Self::Regex(_) => "regex",
            Self::Choice(_) => "choice",
            Self::Ebnf(_) => "grammar",
            Self::StructuralTag(_) => "structural_tag",
            Self::Calls(_) => "tools",
            Self::Free => "thought",
        }
    }

    /// Bytes that it keeps.
    pub fn num_bytes(&self) -> usize {
        match self {
            Self::JsonObject | Self::Free => 0,
            Self::JsonSchema(text, whitespace) => text.len() + whitespace.num_bytes(),
            Self::Regex(text) | Self::Ebnf(text) | Self::StructuralTag(text) => text.len(),
            Self::Choice(texts) => texts.iter().map(|it| it.len() + size_of::<String>()).sum(),
            Self::Calls(form) => form.num_bytes(),
        }
    }

    /// The caps that need no parsing.
    pub(crate) fn check_sizes(&self, limits: &Limits) -> Result<(), CompileError> {
        match self {
            Self::JsonObject | Self::Free => Ok(()),
            Self::JsonSchema(text, _) | Self::StructuralTag(text) => {
                CompileError::check_size("bytes", text.len(), limits.schema_bytes)?;
                let depth = schema::depth(text);
                CompileError::check_size("levels of nesting", depth, limits.schema_depth)
            }
            Self::Regex(text) => CompileError::check_size("bytes", text.len(), limits.regex_bytes),
            Self::Choice(texts) => {
                CompileError::check_size("choices", texts.len(), limits.num_choices)?;
                CompileError::check_size("bytes", self.num_bytes(), limits.choice_bytes)
            }
            Self::Ebnf(text) => CompileError::check_size("bytes", text.len(), limits.grammar_bytes),
            Self::Calls(form) => {
                CompileError::check_size("bytes", form.num_bytes(), limits.schema_bytes)
            }
        }
    }

    /// What the library compiles.
    pub(crate) fn lowered(
        &self,
        vocabulary: &Vocabulary,
        limits: &Limits,
    ) -> Result<TopLevelGrammar, CompileError> {
        match self {
            Self::JsonObject => {
                let schema = json!({"type": "object"});
                Ok(json_grammar(schema::checked(
                    schema,
                    &Whitespace::Free,
                    limits,
                )?))
            }
            Self::JsonSchema(text, whitespace) => {
                let schema = schema::parse(text)?;
                Ok(json_grammar(schema::checked(schema, whitespace, limits)?))
            }
            Self::Regex(regex) => Ok(TopLevelGrammar::from_regex(whole(regex))),
            Self::Choice(texts) => choice_grammar(texts),
            Self::Ebnf(text) => ebnf::lowered(text),
            Self::StructuralTag(text) => Tags::parse(text)?.lowered(vocabulary, limits),
            Self::Calls(form) => form.lowered(vocabulary, limits),
            Self::Free => Err(CompileError::Malformed("it constrains nothing".to_owned())),
        }
    }
}

fn json_grammar(schema: Value) -> TopLevelGrammar {
    TopLevelGrammar::from_grammar(GrammarWithLexer::from_json_schema(schema))
}

/// A whole text is matched, so anchors around the expression say nothing; the library knows none.
pub(crate) fn whole(regex: &str) -> &str {
    let regex = regex.strip_prefix('^').unwrap_or(regex);
    match regex.strip_suffix('$') {
        Some(inner) if !ends_in_escape(inner) => inner,
        _ => regex,
    }
}

fn ends_in_escape(regex: &str) -> bool {
    let num_backslashes = regex
        .bytes()
        .rev()
        .take_while(|byte| *byte == b'\\')
        .count();
    num_backslashes % 2 == 1
}

fn choice_grammar(texts: &[String]) -> Result<TopLevelGrammar, CompileError> {
    if texts.is_empty() {
        return Err(CompileError::Empty("it has no choices".to_owned()));
    }
    let choices: Vec<String> = texts.iter().map(|text| quoted(text)).collect();
    let lark = format!("start: CHOICE\nCHOICE: {}\n", choices.join(" | "));
    Ok(TopLevelGrammar::from_lark(lark))
}

/// A text in Lark.
pub(crate) fn quoted(text: &str) -> String {
    Value::from(text).to_string()
}
