//! What an answer must be that calls tools: the family's own marks around arguments that the tools' schemas hold.

use plait_grammar::{Form, Item, Span};
use plait_text::{ArgumentsWriting, Kind, NameEnd, TaggedWriting, ToolFormat, Tools, Writing};
use serde_json::{Map, Value, json};

use crate::text_argument;

/// A tool that may be called.
pub(crate) struct Callable<'a> {
    pub(crate) name: &'a str,
    /// The JSON Schema of its arguments.
    pub(crate) parameters: Option<&'a Map<String, Value>>,
    /// Its arguments are held to the schema.
    pub(crate) is_held: bool,
}

/// What calls are made of.
pub(crate) struct CallForms<'a> {
    format: &'static ToolFormat,
    tools: &'a Tools,
    /// Nothing follows the first call.
    is_single: bool,
}

/// Writes an argument of this name and schema.
type Pair<'a> = &'a dyn Fn(&str, &Value) -> Result<Form, String>;

/// An argument that has a name.
struct Argument<'a> {
    name: &'a str,
    schema: &'a Value,
    is_required: bool,
}

/// Names of arguments where any are allowed.
const ANY_NAME: &str = "[a-zA-Z_][a-zA-Z0-9_]{0,63}";
/// Keywords about an object as a whole that calls of names and values cannot be held to.
const WHOLE_OBJECT: [&str; 14] = [
    "$ref",
    "allOf",
    "anyOf",
    "oneOf",
    "not",
    "if",
    "enum",
    "const",
    "patternProperties",
    "propertyNames",
    "minProperties",
    "maxProperties",
    "dependentRequired",
    "dependentSchemas",
];

impl<'a> CallForms<'a> {
    pub(crate) fn new(format: &'static ToolFormat, tools: &'a Tools, is_single: bool) -> Self {
        Self {
            format,
            tools,
            is_single,
        }
    }

    /// Calls and nothing else. An error is the callable's index and what its schema has that cannot be held.
    pub(crate) fn required(&self, callables: &[Callable<'_>]) -> Result<Form, (usize, String)> {
        let writings = self.format.writings.iter();
        let forms = writings.map(|writing| self.behind("", writing, callables));
        Ok(Form::OneOf(forms.collect::<Result<_, _>>()?))
    }

    /// Text, in which calls may begin; errors as in `required`.
    pub(crate) fn in_text(&self, callables: &[Callable<'_>]) -> Result<Form, (usize, String)> {
        let text = Span {
            none_of: self.bare().into_iter().collect(),
            ..Span::default()
        };
        let mut begun = Vec::new();
        for marker in self.format.markers_in_text() {
            let writings = self.format.writings.iter();
            let rests = writings.map(|writing| self.behind(marker, writing, callables));
            begun.push(Form::Sequence(vec![
                Form::UpTo(text.clone(), marker.to_owned()),
                Form::OneOf(rests.collect::<Result<_, _>>()?),
            ]));
        }
        if !text.none_of.is_empty() {
            begun.push(self.required(callables)?);
        } else if !self.is_single {
            return Ok(Form::Sequence(vec![
                Form::Repeated {
                    item: Box::new(Form::OneOf(begun)),
                    separator: String::new(),
                    is_required: false,
                },
                Form::Span(text),
            ]));
        }
        begun.push(Form::Span(text));
        Ok(Form::OneOf(begun))
    }

    /// Texts that begin as a call without a marker does.
    fn bare(&self) -> Option<String> {
        let first = self.format.bare()?;
        Some(format!("[ \\n\\r\\t]*\\{}(.|\\n)*", char::from(first)))
    }

    /// What follows a marker: the rest of the first call's beginning, the calls, their end.
    fn behind(
        &self,
        marker: &str,
        writing: &Writing,
        callables: &[Callable<'_>],
    ) -> Result<Form, (usize, String)> {
        let begin = format!("{}{}", writing.begin, writing.call_begin);
        let begin = match begin.split_once(marker) {
            Some((_, rest)) if !marker.is_empty() => rest.to_owned(),
            _ => begin,
        };
        let calls = callables
            .iter()
            .enumerate()
            .map(|(index, callable)| self.call(callable, writing).map_err(|why| (index, why)));
        let call = Form::OneOf(calls.collect::<Result<_, _>>()?);
        let mut parts = vec![text(&begin), call.clone()];
        if !self.is_single {
            let again = format!("{}{}", writing.separator, writing.call_begin);
            parts.push(Form::Repeated {
                item: Box::new(Form::Sequence(vec![text(&again), call])),
                separator: String::new(),
                is_required: false,
            });
        }
        parts.push(text(writing.end));
        Ok(Form::Sequence(parts))
    }

    /// A call from its name to its end.
    fn call(&self, callable: &Callable<'_>, writing: &Writing) -> Result<Form, String> {
        let mut parts = vec![];
        let mut literal = callable.name.to_owned();
        for part in writing.name_end {
            match part {
                NameEnd::Text(text) => literal.push_str(text),
                NameEnd::Regex(regex) => {
                    parts.push(text(&std::mem::take(&mut literal)));
                    parts.push(Form::Regex((*regex).to_owned()));
                }
            }
        }
        parts.push(text(&literal));
        parts.push(self.arguments(callable, &writing.arguments)?);
        parts.push(text(writing.call_end));
        Ok(Form::Sequence(parts))
    }

    fn arguments(
        &self,
        callable: &Callable<'_>,
        writing: &ArgumentsWriting,
    ) -> Result<Form, String> {
        let root = object_schema(callable)?;
        let (separator, pair): (_, Pair<'_>) = match writing {
            ArgumentsWriting::Json => return Ok(Form::Json(Value::Object(root).to_string())),
            ArgumentsWriting::Python => (", ", &|name, schema| {
                let kind = self.tools.kind(callable.name, name);
                python_pair(&root, name, schema, kind)
            }),
            ArgumentsWriting::Tagged(tags) => ("", &|name, schema| {
                let kind = self.tools.kind(callable.name, name);
                check_name(name, &[tags.key_end.trim(), "\n"])?;
                let value = text_argument::value(&root, schema, kind, tags);
                let value = value.map_err(|why| format!("{why} in `{name}`"))?;
                let begin = format!("{}{name}{}", tags.key_begin, tags.key_end);
                Ok(Form::Sequence(vec![
                    text(&begin),
                    value,
                    text(tags.pair_end),
                ]))
            }),
        };
        match named_arguments(&root)? {
            Some(arguments) => {
                let items = arguments.iter().map(|it| {
                    Ok(Item {
                        form: pair(it.name, it.schema)?,
                        is_required: it.is_required,
                    })
                });
                let items = items.collect::<Result<_, String>>()?;
                Ok(Form::List(items, separator.to_owned()))
            }
            None => Ok(Form::Repeated {
                item: Box::new(any_pair(writing)),
                separator: separator.to_owned(),
                is_required: false,
            }),
        }
    }
}

fn text(text: &str) -> Form {
    Form::Text(text.to_owned())
}

/// The schema of a call's arguments, which are an object.
fn object_schema(callable: &Callable<'_>) -> Result<Map<String, Value>, String> {
    let Some(parameters) = callable.parameters else {
        let none = json!({"type": "object", "properties": {}, "additionalProperties": false});
        return Ok(none.as_object().cloned().unwrap_or_default());
    };
    if !callable.is_held {
        return Ok(Map::from_iter([("type".to_owned(), "object".into())]));
    }
    let allows_object = match parameters.get("type") {
        None => true,
        Some(Value::Array(types)) => types.iter().any(|it| it == "object"),
        Some(one) => one == "object",
    };
    if !allows_object {
        return Err(format!("`type` {}", parameters["type"]));
    }
    let mut schema = parameters.clone();
    schema.insert("type".to_owned(), "object".into());
    Ok(schema)
}

/// The arguments in order: name, schema, whether it is required. None: any may come.
fn named_arguments(root: &Map<String, Value>) -> Result<Option<Vec<Argument<'_>>>, String> {
    if let Some(keyword) = WHOLE_OBJECT.iter().find(|it| root.contains_key(**it)) {
        return Err(format!("`{keyword}`"));
    }
    let others = root
        .get("additionalProperties")
        .unwrap_or(&Value::Bool(true));
    let known = root.get("properties").and_then(Value::as_object);
    check_copies(root, known.map_or(0, Map::len))?;
    let required: Vec<&str> = match root.get("required").and_then(Value::as_array) {
        None => Vec::new(),
        Some(names) => names.iter().filter_map(Value::as_str).collect(),
    };
    if known.is_none_or(Map::is_empty) && required.is_empty() && *others == Value::Bool(true) {
        return Ok(None);
    }
    let known = known.into_iter().flatten();
    let mut arguments: Vec<Argument<'_>> = known
        .filter(|(_, schema)| **schema != Value::Bool(false))
        .map(|(name, schema)| Argument {
            name,
            schema,
            is_required: required.contains(&name.as_str()),
        })
        .collect();
    for name in required {
        match arguments.iter().any(|known| known.name == name) {
            true => {}
            false if *others == Value::Bool(false) => {
                return Err(format!("`required` {name:?}, which `properties` lacks,"));
            }
            false => arguments.push(Argument {
                name,
                schema: others,
                is_required: true,
            }),
        }
    }
    Ok(Some(arguments))
}

/// Each argument's schema gets the definitions with it.
fn check_copies(root: &Map<String, Value>, num_arguments: usize) -> Result<(), String> {
    const MAX_BYTES: usize = 4 << 20;
    let definitions = ["$defs", "definitions"].map(|name| {
        let found = root.get(name);
        found.map_or(0, |it| it.to_string().len())
    });
    let num_bytes = definitions[0] + definitions[1];
    match num_bytes.saturating_mul(num_arguments) > MAX_BYTES {
        true => Err(format!(
            "{num_bytes} bytes of definitions for {num_arguments} arguments"
        )),
        false => Ok(()),
    }
}

fn python_pair(
    root: &Map<String, Value>,
    name: &str,
    schema: &Value,
    kind: Kind,
) -> Result<Form, String> {
    check_name(name, &["=", ")", "(", "\n", "\"", "\\"])?;
    let json = with_definitions(root, schema).to_string();
    let mut values = Vec::new();
    let is_listed = json.contains("\"enum\"") || json.contains("\"const\"");
    if let (Kind::Json(accepts), false) = (kind, is_listed) {
        let words = [
            (accepts.boolean, "True"),
            (accepts.boolean, "False"),
            (accepts.null, "None"),
        ];
        let words = words.into_iter().filter(|(is_taken, _)| *is_taken);
        values.extend(words.map(|(_, word)| text(word)));
    }
    values.push(Form::Json(json));
    Ok(Form::Sequence(vec![
        text(&format!("{name}=")),
        Form::OneOf(values),
    ]))
}

/// A name that the reader of calls would not find again is refused.
fn check_name(name: &str, ends: &[&str]) -> Result<(), String> {
    const MAX_BYTES: usize = 200;
    let is_broken = ends.iter().any(|end| name.contains(end));
    match is_broken || name.trim() != name || name.is_empty() || name.len() > MAX_BYTES {
        true => Err(format!("the name {name:?}")),
        false => Ok(()),
    }
}

/// An argument's schema with the definitions that it may refer to.
pub(crate) fn with_definitions(root: &Map<String, Value>, schema: &Value) -> Value {
    let Value::Object(schema) = schema else {
        return schema.clone();
    };
    let mut schema = schema.clone();
    if Value::Object(schema.clone())
        .to_string()
        .contains("\"$ref\"")
    {
        for name in ["$defs", "definitions"] {
            if let Some(definitions) = root.get(name) {
                schema.insert(name.to_owned(), definitions.clone());
            }
        }
    }
    Value::Object(schema)
}

/// Any name with any value.
fn any_pair(writing: &ArgumentsWriting) -> Form {
    let name = Form::Regex(ANY_NAME.to_owned());
    match writing {
        ArgumentsWriting::Tagged(tags) => Form::Sequence(vec![
            text(tags.key_begin),
            name,
            text(tags.key_end),
            up_to_end(Span::default(), tags),
            text(tags.pair_end),
        ]),
        _ => Form::Sequence(vec![name, text("="), Form::Json("{}".to_owned())]),
    }
}

/// A value of these texts, up to its mark.
pub(crate) fn up_to_end(mut span: Span, tags: &TaggedWriting) -> Form {
    if !tags.misread.is_empty() {
        span.none_of.push(tags.misread.to_owned());
    }
    Form::UpTo(span, tags.value_end.to_owned())
}
