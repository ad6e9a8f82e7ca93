//! Arguments that calls have as plain texts: which texts their schema allows, as the reader of calls takes them.

use plait_grammar::{Form, Span};
use plait_text::{Accepts, Kind, TaggedWriting};
use serde_json::{Map, Value, json};

use crate::call_grammar::{up_to_end, with_definitions};

/// References and choices inside each other.
const MAX_DEPTH: usize = 8;
/// Keywords that say nothing about a value.
const ANNOTATIONS: [&str; 9] = [
    "title",
    "description",
    "default",
    "examples",
    "deprecated",
    "readOnly",
    "writeOnly",
    "$comment",
    "nullable",
];
/// Keywords about numbers.
const BOUNDS: [&str; 5] = [
    "minimum",
    "maximum",
    "exclusiveMinimum",
    "exclusiveMaximum",
    "multipleOf",
];
/// Keywords about values of any type that no text is held to.
const CONDITIONS: [&str; 2] = ["not", "if"];
const SPACES: &str = "[ \\n\\r\\t]*";
const NUMBER: &str = "-?(0|[1-9][0-9]{0,15})(\\.[0-9]{1,15})?([eE][-+]?[0-9]{1,2})?";
const INTEGER: &str = "-?(0|[1-9][0-9]{0,15})";
/// Subsets of the formats, as whole texts.
const FORMATS: [(&str, &str); 8] = [
    (
        "uuid",
        "[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}",
    ),
    (
        "ipv4",
        "((25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])\\.){3}(25[0-5]|2[0-4][0-9]|1?[0-9]?[0-9])",
    ),
    (
        "email",
        "[a-zA-Z0-9_+-]+(\\.[a-zA-Z0-9_+-]+)*@[a-zA-Z0-9]+(\\.[a-zA-Z0-9]+)+",
    ),
    ("hostname", "[a-zA-Z0-9]{1,63}(\\.[a-zA-Z0-9]{1,63}){0,3}"),
    (
        "uri",
        "[a-zA-Z][a-zA-Z0-9+.-]*://[a-zA-Z0-9.-]+(:[0-9]{1,5})?(/[a-zA-Z0-9._~!$'()*+,;=:@-]*)*(\\?[a-zA-Z0-9._~=&+-]*)?",
    ),
    ("date", "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])"),
    (
        "time",
        "([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])",
    ),
    (
        "date-time",
        "[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\\.[0-9]{1,9})?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])",
    ),
];
/// Formats of the specification that no text is held to.
const OTHER_FORMATS: [&str; 2] = ["ipv6", "duration"];

/// An argument's value and its end mark. An error says what the schema has that cannot be held.
pub(crate) fn value(
    root: &Map<String, Value>,
    schema: &Value,
    kind: Kind,
    tags: &TaggedWriting,
) -> Result<Form, String> {
    let accepts = match kind {
        Kind::Json(accepts) if !accepts.text => {
            return Ok(Form::Sequence(vec![
                Form::Json(with_definitions(root, schema).to_string()),
                Form::Text(tags.value_end.to_owned()),
            ]));
        }
        Kind::Json(accepts) => accepts,
        Kind::Text => Accepts {
            text: true,
            ..Accepts::default()
        },
    };
    let mut found = Leaves::default();
    gather(root, schema, MAX_DEPTH, &mut found)?;
    let leaves = found.leaves;
    if leaves.iter().any(Map::is_empty) {
        return Ok(up_to_end(Span::default(), tags));
    }
    let mut forms = Vec::new();
    for leaf in &leaves {
        add_leaf(root, leaf, accepts, tags, &mut forms)?;
    }
    match forms.is_empty() {
        true => Err("no value that a text can be".to_owned()),
        false => Ok(Form::OneOf(forms)),
    }
}

/// Schemas looked at for one argument. Choices within choices multiply.
const MAX_LOOKED_AT: usize = 1024;

#[derive(Default)]
struct Leaves {
    leaves: Vec<Map<String, Value>>,
    num_looked_at: usize,
}

/// The schemas without choices and references of which one must hold.
fn gather(
    root: &Map<String, Value>,
    schema: &Value,
    depth: usize,
    found: &mut Leaves,
) -> Result<(), String> {
    found.num_looked_at += 1;
    if found.num_looked_at > MAX_LOOKED_AT {
        return Err(format!("more than {MAX_LOOKED_AT} choices within choices"));
    }
    let Some(depth) = depth.checked_sub(1) else {
        return Err("schemas too deep inside each other".to_owned());
    };
    let mut schema = match schema {
        Value::Object(schema) => schema.clone(),
        Value::Bool(false) => return Ok(()),
        _ => Map::new(),
    };
    schema.retain(|keyword, _| !ANNOTATIONS.contains(&keyword.as_str()));
    if let Some(reference) = schema.shift_remove("$ref") {
        let target = referenced(root, &reference)?;
        return gather(root, &joined(&schema, target)?, depth, found);
    }
    if let Some(Value::Array(all)) = schema.shift_remove("allOf") {
        let whole = all.iter().try_fold(Value::Object(schema), |whole, part| {
            joined(whole.as_object().unwrap_or(&Map::new()), part)
        })?;
        return gather(root, &whole, depth, found);
    }
    for keyword in ["anyOf", "oneOf"] {
        let Some(Value::Array(choices)) = schema.shift_remove(keyword) else {
            continue;
        };
        let first = found.leaves.len();
        for choice in &choices {
            gather(root, &joined(&schema, choice)?, depth, found)?;
        }
        return match keyword == "oneOf" && overlap(&found.leaves[first..]) {
            true => Err("`oneOf`, whose options may hold together,".to_owned()),
            false => Ok(()),
        };
    }
    found.leaves.push(schema);
    Ok(())
}

fn referenced<'a>(root: &'a Map<String, Value>, reference: &Value) -> Result<&'a Value, String> {
    let path = reference.as_str().and_then(|it| it.strip_prefix("#/"));
    let target = path.and_then(|path| {
        let mut steps = path.split('/');
        let first = root.get(steps.next()?)?;
        steps.try_fold(first, |at, step| {
            at.get(step.replace("~1", "/").replace("~0", "~"))
        })
    });
    target.ok_or_else(|| format!("`$ref` {reference}"))
}

/// What holds where both hold.
fn joined(one: &Map<String, Value>, other: &Value) -> Result<Value, String> {
    let other = match other {
        Value::Object(other) => other,
        Value::Bool(false) => return Ok(Value::Bool(false)),
        _ => return Ok(Value::Object(one.clone())),
    };
    let mut both = one.clone();
    for (keyword, value) in other {
        match both.get(keyword) {
            _ if ANNOTATIONS.contains(&keyword.as_str()) => {}
            None => {
                both.insert(keyword.clone(), value.clone());
            }
            Some(known) if known == value => {}
            Some(_) => return Err(format!("`{keyword}` twice")),
        }
    }
    Ok(Value::Object(both))
}

/// Whether a value may match two of them.
fn overlap(leaves: &[Map<String, Value>]) -> bool {
    let types = leaves.iter().map(types_of);
    let mut all: Vec<&str> = types.flatten().collect();
    all.sort_unstable();
    all.windows(2).any(|pair| pair[0] == pair[1])
        || (all.contains(&"integer") && all.contains(&"number"))
}

fn types_of(leaf: &Map<String, Value>) -> Vec<&str> {
    match leaf.get("type") {
        Some(Value::String(one)) => vec![one],
        Some(Value::Array(types)) => types.iter().filter_map(Value::as_str).collect(),
        _ => vec!["string", "number", "boolean", "null", "array", "object"],
    }
}

/// The texts of one schema without choices.
fn add_leaf(
    root: &Map<String, Value>,
    leaf: &Map<String, Value>,
    accepts: Accepts,
    tags: &TaggedWriting,
    forms: &mut Vec<Form>,
) -> Result<(), String> {
    if let Some(keyword) = CONDITIONS.iter().find(|it| leaf.contains_key(**it)) {
        return Err(format!("`{keyword}`"));
    }
    if let Some(values) = listed(leaf)? {
        let texts = values.iter().filter_map(|it| as_text(it, accepts));
        forms.extend(texts.map(|text| only(&escaped(&text), tags)));
        return Ok(());
    }
    for kind in types_of(leaf) {
        match kind {
            "string" => forms.push(up_to_end(string(leaf, accepts)?, tags)),
            "null" => forms.push(only("null", tags)),
            "boolean" => forms.push(only("true|false", tags)),
            // A number that is held to bounds cannot be told from a text.
            "integer" | "number" if BOUNDS.iter().any(|it| leaf.contains_key(*it)) => {}
            "integer" => forms.push(only(INTEGER, tags)),
            "number" => forms.push(only(NUMBER, tags)),
            _ => {
                let mut schema = leaf.clone();
                schema.insert("type".to_owned(), json!(kind));
                forms.push(Form::Sequence(vec![
                    Form::Json(with_definitions(root, &Value::Object(schema)).to_string()),
                    Form::Text(tags.value_end.to_owned()),
                ]));
            }
        }
    }
    Ok(())
}

/// The values that are listed, of those that the other keywords hold for.
fn listed(leaf: &Map<String, Value>) -> Result<Option<Vec<&Value>>, String> {
    let values: Vec<&Value> = match (leaf.get("const"), leaf.get("enum")) {
        (Some(one), _) => vec![one],
        (None, Some(Value::Array(values))) => values.iter().collect(),
        (None, _) => return Ok(None),
    };
    if let Some(keyword) = ["pattern", "format"]
        .iter()
        .find(|it| leaf.contains_key(**it))
    {
        return Err(format!("`{keyword}` beside `enum` or `const`"));
    }
    let holds = values.into_iter().filter(|value| holds(leaf, value));
    Ok(Some(holds.collect()))
}

/// Whether the keywords about one value hold for a scalar, `pattern` and `format` apart.
fn holds(leaf: &Map<String, Value>, value: &Value) -> bool {
    let is_listed = leaf
        .get("enum")
        .and_then(Value::as_array)
        .is_none_or(|values| {
            values.iter().any(|other| {
                other == value || (other.is_number() && other.as_f64() == value.as_f64())
            })
        });
    let bound = |keyword: &str| leaf.get(keyword).and_then(Value::as_f64);
    let is_within = match value {
        Value::String(text) => {
            let length = text.chars().count() as f64;
            bound("minLength").is_none_or(|it| length >= it)
                && bound("maxLength").is_none_or(|it| length <= it)
        }
        Value::Number(number) => number.as_f64().is_some_and(|number| {
            bound("minimum").is_none_or(|it| number >= it)
                && bound("maximum").is_none_or(|it| number <= it)
                && bound("exclusiveMinimum").is_none_or(|it| number > it)
                && bound("exclusiveMaximum").is_none_or(|it| number < it)
                && bound("multipleOf").is_none_or(|it| is_whole(number / it))
        }),
        _ => true,
    };
    is_listed && is_within && types_of(leaf).iter().any(|kind| is_of(kind, value))
}

/// But for the rounding of a quotient of decimal fractions.
fn is_whole(quotient: f64) -> bool {
    (quotient - quotient.round()).abs() <= 1e-9 * quotient.abs().max(1.0)
}

fn is_of(kind: &str, value: &Value) -> bool {
    match kind {
        "string" => value.is_string(),
        "integer" => value.as_f64().is_some_and(|it| it.fract() == 0.0),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        "array" => value.is_array(),
        _ => value.is_object(),
    }
}

/// Only texts of this expression.
fn only(regex: &str, tags: &TaggedWriting) -> Form {
    let span = Span {
        all_of: vec![regex.to_owned()],
        ..Span::default()
    };
    up_to_end(span, tags)
}

/// The text that the reader takes for this value, if one is.
fn as_text(value: &Value, accepts: Accepts) -> Option<String> {
    match value {
        Value::String(text) => {
            let word = text.trim_matches([' ', '\n', '\r', '\t']);
            let json = match word {
                "None" => Some(Value::Null),
                "True" | "False" => Some(Value::Bool(true)),
                word => serde_json::from_str(word).ok(),
            };
            let is_misread = json.is_some_and(|json: Value| match json {
                Value::Null => accepts.null,
                Value::Bool(_) => accepts.boolean,
                Value::Number(_) => accepts.number,
                Value::Array(_) => accepts.array,
                Value::Object(_) => accepts.object,
                Value::String(_) => false,
            });
            (!is_misread).then(|| text.clone())
        }
        Value::Array(_) | Value::Object(_) => None,
        scalar => Some(scalar.to_string()),
    }
}

/// The texts of a schema of strings, but for those that are read as something else.
fn string(leaf: &Map<String, Value>, accepts: Accepts) -> Result<Span, String> {
    let mut span = Span::default();
    if let Some(pattern) = leaf.get("pattern").and_then(Value::as_str) {
        span.all_of.push(search(pattern));
    }
    let length = |keyword: &str| leaf.get(keyword).and_then(Value::as_u64);
    if let (least, most @ Some(_)) | (least @ Some(_), most) =
        (length("minLength"), length("maxLength"))
    {
        let most = most.map_or_else(String::new, |it| it.to_string());
        span.all_of
            .push(format!("(.|\\n){{{},{most}}}", least.unwrap_or(0)));
    }
    if let Some(format) = leaf.get("format").and_then(Value::as_str) {
        if OTHER_FORMATS.contains(&format) {
            return Err(format!("`format` {format:?}"));
        }
        let known = FORMATS.iter().find(|(name, _)| *name == format);
        span.all_of
            .extend(known.map(|(_, regex)| (*regex).to_owned()));
    }
    let misread = [
        (accepts.null, "(null|None)".to_owned()),
        (accepts.boolean, "(true|false|True|False)".to_owned()),
        (
            accepts.number,
            "-?[0-9]+(\\.[0-9]+)?([eE][-+]?[0-9]+)?".to_owned(),
        ),
        (accepts.array, "\\[(.|\\n)*".to_owned()),
        (accepts.object, "\\{(.|\\n)*".to_owned()),
    ];
    let misread = misread.into_iter().filter(|(is_read, _)| *is_read);
    span.none_of
        .extend(misread.map(|(_, regex)| format!("{SPACES}{regex}{SPACES}")));
    Ok(span)
}

/// A pattern of JSON Schema is found anywhere in a text.
fn search(pattern: &str) -> String {
    let (before, inner) = match pattern.strip_prefix('^') {
        Some(inner) => ("", inner),
        None => ("(.|\\n)*", pattern),
    };
    let (inner, behind) = match inner.strip_suffix('$') {
        Some(inner) if !inner.ends_with('\\') => (inner, ""),
        _ => (inner, "(.|\\n)*"),
    };
    format!("{before}({inner}){behind}")
}

/// The text in a regular expression.
fn escaped(text: &str) -> String {
    let mut regex = String::new();
    for letter in text.chars() {
        if "\\.+*?()|[]{}^$#&-~".contains(letter) {
            regex.push('\\');
        }
        regex.push(letter);
    }
    regex
}
