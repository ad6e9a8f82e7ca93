//! Texts of a given form: tool calls in their family's markers, free text with tagged parts.

use std::collections::HashMap;
use std::fmt::Write as _;

use llguidance::api::TopLevelGrammar;

use crate::constraint::{quoted, whole};
use crate::error::CompileError;
use crate::limits::Limits;
use crate::schema;
use crate::vocabulary::Vocabulary;
use crate::whitespace::Whitespace;

/// What a text is made of.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Form {
    /// This text. The spelling of a special token in it is that token.
    Text(String),
    /// JSON that this schema, itself JSON, validates.
    Json(String),
    /// What this regular expression matches as a whole.
    Regex(String),
    /// A text, as long as it can be.
    Span(Span),
    /// A text without this mark, and the mark.
    UpTo(Span, String),
    /// One after the other.
    Sequence(Vec<Form>),
    /// Any one of them.
    OneOf(Vec<Form>),
    /// This, any number of times.
    Repeated {
        /// What is repeated.
        item: Box<Form>,
        /// Between two of them.
        separator: String,
        /// Whether it is there at all.
        is_required: bool,
    },
    /// These in their order, and this between two of them.
    List(Vec<Item>, String),
}

/// A part of a list.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Item {
    /// The part.
    pub form: Form,
    /// Whether it is there at all.
    pub is_required: bool,
}

/// Which texts: any that all of these regular expressions match, and none of those.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Span {
    /// Each matches the whole text.
    pub all_of: Vec<String>,
    /// None matches the whole text.
    pub none_of: Vec<String>,
}

impl Span {
    fn num_bytes(&self) -> usize {
        let regexes = self.all_of.iter().chain(&self.none_of);
        regexes.map(|it| it.len() + size_of::<String>()).sum()
    }
}

impl Form {
    /// Bytes that it keeps.
    pub(crate) fn num_bytes(&self) -> usize {
        let inside = match self {
            Self::Text(text) | Self::Json(text) | Self::Regex(text) => text.len(),
            Self::Span(span) => span.num_bytes(),
            Self::UpTo(span, mark) => span.num_bytes() + mark.len(),
            Self::Sequence(forms) | Self::OneOf(forms) => forms.iter().map(Self::num_bytes).sum(),
            Self::Repeated {
                item, separator, ..
            } => item.num_bytes() + separator.len(),
            Self::List(items, separator) => {
                let items = items.iter().map(|item| item.form.num_bytes());
                items.sum::<usize>() + separator.len()
            }
        };
        size_of::<Self>() + inside
    }

    pub(crate) fn lowered(
        &self,
        vocabulary: &Vocabulary,
        limits: &Limits,
    ) -> Result<TopLevelGrammar, CompileError> {
        let mut lark = Lark {
            vocabulary,
            limits,
            rules: String::new(),
            names: HashMap::new(),
            num_names: 0,
        };
        let start = lark.expression(self)?;
        let text = format!("start: {start}\n{}", lark.rules);
        Ok(TopLevelGrammar::from_lark(text))
    }
}

/// Refuses a schema that no answer can be held to, by keyword and place.
pub fn check_schema(schema: &str, limits: &Limits) -> Result<(), CompileError> {
    CompileError::check_size(
        "levels of nesting",
        schema::depth(schema),
        limits.schema_depth,
    )?;
    schema::checked(schema::parse(schema)?, &Whitespace::Free, limits).map(|_| ())
}

/// Between JSON's tokens, as templates write it.
const SPACE: &str = " ";
/// Any text, in the library's language.
const ANY: &str = r"/(.|\n)*/";

/// Writes the library's language. Equal forms share a rule.
struct Lark<'a> {
    vocabulary: &'a Vocabulary,
    limits: &'a Limits,
    rules: String,
    names: HashMap<&'a Form, String>,
    num_names: usize,
}

impl<'a> Lark<'a> {
    fn expression(&mut self, form: &'a Form) -> Result<String, CompileError> {
        if let Form::Text(text) = form {
            return Ok(self.literal(text));
        }
        if let Some(name) = self.names.get(form) {
            return Ok(name.clone());
        }
        let (name, options, body) = match form {
            Form::UpTo(span, mark) => self.up_to(span, mark)?,
            Form::Span(span) => (self.new_name("T"), "", self.span(span)?),
            _ => {
                let body = self.body(form)?;
                (self.new_name("r"), "", body)
            }
        };
        self.add_rule(&format!("{name}{options}"), &body);
        self.names.insert(form, name.clone());
        Ok(name)
    }

    fn body(&mut self, form: &'a Form) -> Result<String, CompileError> {
        match form {
            Form::Text(_) | Form::Span(_) | Form::UpTo(..) => self.expression(form),
            Form::Json(schema) => self.json(schema),
            Form::Regex(regex) => self.regex(regex),
            Form::Sequence(forms) => self.all(forms, " "),
            Form::OneOf(forms) => self.all(forms, " | "),
            Form::Repeated {
                item,
                separator,
                is_required,
            } => {
                let item = self.expression(item)?;
                let again = format!("{item} ({} {item})*", self.literal(separator));
                Ok(match is_required {
                    true => again,
                    false => format!("({again})?"),
                })
            }
            Form::List(items, separator) => self.list(items, separator),
        }
    }

    fn all(&mut self, forms: &'a [Form], between: &str) -> Result<String, CompileError> {
        let parts = forms.iter().map(|form| self.expression(form));
        Ok(parts.collect::<Result<Vec<_>, _>>()?.join(between))
    }

    /// From the last item to the first: what may follow with another before it, and without.
    fn list(&mut self, items: &'a [Item], separator: &str) -> Result<String, CompileError> {
        let separator = self.literal(separator);
        let (mut behind, mut from_here) = (String::from("\"\""), String::from("\"\""));
        for item in items.iter().rev() {
            let form = self.expression(&item.form)?;
            let begun = format!("{form} {behind}");
            let (next, first) = match item.is_required {
                true => (format!("{separator} {begun}"), begun),
                false => (
                    format!("{separator} {begun} | {behind}"),
                    format!("{begun} | {from_here}"),
                ),
            };
            (behind, from_here) = (self.new_name("r"), self.new_name("r"));
            self.add_rule(&behind.clone(), &next);
            self.add_rule(&from_here.clone(), &first);
        }
        Ok(from_here)
    }

    fn up_to(
        &mut self,
        span: &Span,
        mark: &str,
    ) -> Result<(String, &'static str, String), CompileError> {
        let body = self.span(span)?;
        let text = self.new_name("T");
        if let Some(id) = self.vocabulary.special_token(mark) {
            self.add_rule(&text, &body);
            return Ok((self.new_name("r"), "", format!("{text} <[{id}]>")));
        }
        let contains = format!("/(.|\\n)*{}(.|\\n)*/", in_regex(mark));
        self.add_rule(&text, &format!("{body} & ~{contains}"));
        Ok((
            self.new_name("r"),
            "[lazy]",
            format!("{text} {}", quoted(mark)),
        ))
    }

    fn span(&self, span: &Span) -> Result<String, CompileError> {
        let mut body = String::from(ANY);
        for regex in &span.all_of {
            let _ = write!(body, " & {}", self.regex(regex)?);
        }
        for regex in &span.none_of {
            let _ = write!(body, " & ~{}", self.regex(regex)?);
        }
        Ok(body)
    }

    fn regex(&self, regex: &str) -> Result<String, CompileError> {
        CompileError::check_size("bytes", regex.len(), self.limits.regex_bytes)?;
        Ok(format!(
            "/{}/",
            llguidance::regex_to_lark(whole(regex), "dw")
        ))
    }

    fn json(&self, schema: &str) -> Result<String, CompileError> {
        let schema = schema::parse(schema)?;
        let spaces = Whitespace::Pattern(SPACE.to_owned());
        let schema = schema::checked(schema, &spaces, self.limits)?;
        Ok(format!("%json {schema}"))
    }

    /// A text, in which the spelling of a special token is that token.
    fn literal(&self, text: &str) -> String {
        let parts = self.vocabulary.split_at_special(text);
        let parts = parts.into_iter().map(|(text, special)| {
            let special = special.map_or_else(String::new, |id| format!("<[{id}]>"));
            match text {
                "" => special,
                text => format!("{} {special}", quoted(text)),
            }
        });
        parts.collect::<Vec<_>>().join(" ")
    }

    fn add_rule(&mut self, name: &str, body: &str) {
        let _ = writeln!(self.rules, "{name}: {body}");
    }

    fn new_name(&mut self, kind: &str) -> String {
        self.num_names += 1;
        format!("{kind}_{}", self.num_names)
    }
}

/// A text within a regular expression of the library's language.
fn in_regex(text: &str) -> String {
    let mut escaped = String::new();
    for letter in text.chars() {
        match letter {
            '\n' => escaped.push_str("\\n"),
            letter if r"\.+*?()|[]{}^$#&-~/".contains(letter) => escaped.extend(['\\', letter]),
            letter => escaped.push(letter),
        }
    }
    escaped
}
