//! Free text with tagged parts that are constrained: structural tags.

use serde::Deserialize;
use serde_json::Value;

use llguidance::api::TopLevelGrammar;

use crate::constraint::{quoted, whole};
use crate::error::CompileError;
use crate::limits::Limits;
use crate::schema;
use crate::structural_format;
use crate::vocabulary::Vocabulary;
use crate::whitespace::Whitespace;

/// A tag's marks and what stands between them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tag {
    /// Its first mark, which begins with a trigger. A special token's spelling is that token.
    pub begin: String,
    /// What follows.
    pub content: TagContent,
    /// Its last mark; may be empty.
    pub end: String,
}

/// What a tag holds.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum TagContent {
    /// JSON that this schema, itself JSON, validates.
    JsonSchema(String),
    /// A text that this regular expression matches as a whole.
    Regex(String),
}

/// Tags in a text.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Tags {
    /// What may be tagged.
    pub tags: Vec<Tag>,
    /// A text that has one of these goes on as one of the tags that begin with it. Empty: there is no free text.
    pub triggers: Vec<String>,
    /// A text between two tags without free text, such as a line's end.
    pub separator: String,
    /// Whether there is at least one tag.
    pub is_required: bool,
    /// Whether nothing follows the first tag.
    pub is_single: bool,
}

/// vLLM's and `SGLang`'s structural tag.
#[derive(Deserialize)]
struct StructuralTag {
    structures: Option<Vec<Structure>>,
    triggers: Option<Vec<String>>,
    format: Option<Value>,
}

#[derive(Deserialize)]
struct Structure {
    begin: String,
    schema: Option<Value>,
    #[serde(default)]
    end: String,
}

impl Tags {
    /// Reads `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, or `{"format": {"type", ...}}`.
    pub fn parse(json: &str) -> Result<Self, CompileError> {
        let problem = |problem: &str| CompileError::Malformed(problem.to_owned());
        let parsed: StructuralTag = serde_json::from_str(json).map_err(|error| {
            CompileError::Malformed(format!("a structural tag's JSON: {error}"))
        })?;
        if let Some(format) = parsed.format {
            return structural_format::tags_of(format);
        }
        let structures = parsed.structures.ok_or_else(|| {
            problem("a structural tag has `structures` and `triggers`, or a `format`")
        })?;
        let triggers = parsed.triggers.unwrap_or_default();
        if triggers.is_empty() || triggers.iter().any(String::is_empty) {
            return Err(problem(
                "a structural tag has at least one trigger, and none is empty",
            ));
        }
        let tags = structures.into_iter().map(|structure| Tag {
            begin: structure.begin,
            content: TagContent::JsonSchema(
                structure.schema.unwrap_or(Value::Bool(true)).to_string(),
            ),
            end: structure.end,
        });
        Ok(Self {
            tags: tags.collect(),
            triggers,
            separator: String::new(),
            is_required: false,
            is_single: false,
        })
    }

    pub(crate) fn lowered(
        &self,
        vocabulary: &Vocabulary,
        limits: &Limits,
    ) -> Result<TopLevelGrammar, CompileError> {
        if self.tags.is_empty() {
            return Err(CompileError::Empty("it has no tags".to_owned()));
        }
        let lark = Lark { vocabulary, limits };
        match self.triggers.is_empty() {
            true => lark.tags_alone(self),
            false => lark.tags_in_text(self),
        }
        .map(TopLevelGrammar::from_lark)
    }
}

/// Writes the library's language.
struct Lark<'a> {
    vocabulary: &'a Vocabulary,
    limits: &'a Limits,
}

impl Lark<'_> {
    /// One tag after the other, and nothing else.
    fn tags_alone(&self, tags: &Tags) -> Result<String, CompileError> {
        let separator = self.literal(&tags.separator);
        let start = match (tags.is_required, tags.is_single) {
            (true, true) => "tag".to_owned(),
            (false, true) => "tag?".to_owned(),
            (true, false) => format!("tag ({separator} tag)*"),
            (false, false) => format!("(tag ({separator} tag)*)?"),
        };
        let names: Vec<String> = (0..tags.tags.len()).map(|it| format!("tag_{it}")).collect();
        let mut lark = format!("start: {start}\ntag: {}\n", names.join(" | "));
        for (name, tag) in names.iter().zip(&tags.tags) {
            let begin = self.literal(&tag.begin);
            lark += &format!("{name}: {begin} {}\n", self.behind_begin(tag)?);
        }
        Ok(lark)
    }

    /// Free text up to a trigger, then one of the tags that begin with it, and so on.
    fn tags_in_text(&self, tags: &Tags) -> Result<String, CompileError> {
        let mut names = Vec::new();
        let mut rules = String::new();
        for (index, tag) in tags.tags.iter().enumerate() {
            let trigger = tags.triggers.iter().find(|it| tag.begin.starts_with(*it));
            let Some(trigger) = trigger else {
                let problem = format!("no trigger is the beginning of the tag {:?}", tag.begin);
                return Err(CompileError::Malformed(problem));
            };
            let rest = self.literal(&tag.begin[trigger.len()..]);
            let behind = self.behind_begin(tag)?;
            let up_to = match self.vocabulary.special_token(trigger) {
                Some(id) => format!("TEXT <[{id}]>"),
                None => {
                    rules += &format!("head_{index}[lazy]: TEXT {}\n", quoted(trigger));
                    format!("head_{index}")
                }
            };
            rules += &format!("tag_{index}: {up_to} {rest} {behind}\n");
            names.push(format!("tag_{index}"));
        }
        let tag = names.join(" | ");
        let start = match (tags.is_required, tags.is_single) {
            (true, true) => "tag".to_owned(),
            (false, true) => "tag | TEXT".to_owned(),
            (true, false) => "tag+ TEXT".to_owned(),
            (false, false) => "tag* TEXT".to_owned(),
        };
        Ok(format!(
            "start: {start}\ntag: {tag}\nTEXT: /(.|\\n)*/\n{rules}"
        ))
    }

    fn behind_begin(&self, tag: &Tag) -> Result<String, CompileError> {
        let content = match &tag.content {
            TagContent::JsonSchema(text) => {
                let schema = schema::parse(text)?;
                let schema = schema::checked(schema, &Whitespace::Free, self.limits)?;
                format!("%json {schema}")
            }
            TagContent::Regex(regex) => {
                let size = regex.len();
                CompileError::check_size("bytes", size, self.limits.regex_bytes)?;
                let regex = llguidance::regex_to_lark(whole(regex), "");
                format!("/{regex}/")
            }
        };
        Ok(format!("{content} {}", self.literal(&tag.end)))
    }

    /// A text, in which the spelling of a special token is that token.
    fn literal(&self, text: &str) -> String {
        match self.vocabulary.special_token(text) {
            _ if text.is_empty() => String::new(),
            Some(id) => format!("<[{id}]>"),
            None => quoted(text),
        }
    }
}
