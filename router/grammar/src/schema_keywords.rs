//! What becomes of each keyword of JSON Schema, of whatever draft.

use serde_json::{Map, Value, json};

use crate::error::CompileError;
use crate::limits::Limits;

/// Integers from it on are not told apart as 64-bit floats, in which the library counts.
const LARGEST_NUMBER: f64 = 9_007_199_254_740_992.0;

/// Formats that masks hold.
const HELD_FORMATS: [&str; 7] = [
    "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid",
];
/// The specification's other formats. Unknown ones say nothing, as it says.
const OTHER_FORMATS: [&str; 9] = [
    "idn-email",
    "idn-hostname",
    "iri",
    "iri-reference",
    "json-pointer",
    "regex",
    "relative-json-pointer",
    "uri-reference",
    "uri-template",
];

macro_rules! date {
    () => {
        concat!(
            "(?:[0-9]{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)",
            "|02-(?:0[1-9]|1[0-9]|2[0-8]))",
            "|(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29)"
        )
    };
}

macro_rules! time {
    () => {
        concat!(
            "(?:[01][0-9]|2[0-3])(?::[0-5][0-9]){2}(?:\\.[0-9]+)?",
            "(?:[zZ]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
        )
    };
}

/// Formats that the library holds too loosely: it takes 29 February of every year, and a leap second at any time.
const PATTERNS: [(&str, &str); 3] = [
    ("date", concat!("^", date!(), "$")),
    ("time", concat!("^", time!(), "$")),
    ("date-time", concat!("^", date!(), "[tT]", time!(), "$")),
];

/// What becomes of a keyword.
pub(crate) enum Decision {
    /// Masks hold it, or it is an annotation.
    Held,
    /// It changes nothing with this value.
    SaysNothing,
    /// This schema says the same.
    Instead(Value),
    /// Masks cannot hold it. The text says what.
    Refused(String),
}

/// What becomes of `keyword` beside the others of its schema.
pub(crate) fn decision(
    keyword: &str,
    value: &Value,
    beside: &Map<String, Value>,
    limits: &Limits,
) -> Result<Decision, CompileError> {
    let is = |needed| {
        if needed {
            refused(keyword)
        } else {
            Decision::SaysNothing
        }
    };
    Ok(match keyword {
        "uniqueItems" => is(value != &Value::Bool(false)),
        "not" => is(value != &Value::Bool(false)),
        "contains" => is(true),
        "minContains" | "maxContains" => is(beside.contains_key("contains")),
        "if" => is(beside.contains_key("then") || beside.contains_key("else")),
        "then" | "else" => is(beside.contains_key("if")),
        "propertyNames" | "unevaluatedItems" | "unevaluatedProperties" => is(!allows_all(value)),
        "dependentRequired" | "dependentSchemas" | "dependencies" => {
            is(!value.as_object().is_some_and(Map::is_empty))
        }
        "$dynamicRef" | "$recursiveRef" => is(true),
        "x-guidance" => Decision::SaysNothing,
        "format" => format(value, beside),
        "oneOf" => one_of(value),
        "minProperties" => min_properties(value, beside),
        "minimum" | "maximum" | "exclusiveMinimum" | "exclusiveMaximum" | "multipleOf" => {
            instance(keyword, value)
        }
        "const" | "enum" => instance(keyword, value),
        "pattern" => {
            check_regex(value.as_str().unwrap_or_default(), limits)?;
            Decision::Held
        }
        "patternProperties" => {
            for pattern in value.as_object().into_iter().flat_map(Map::keys) {
                check_regex(pattern, limits)?;
            }
            Decision::Held
        }
        _ => Decision::Held,
    })
}

fn refused(keyword: &str) -> Decision {
    Decision::Refused(format!("`{keyword}`"))
}

fn check_regex(regex: &str, limits: &Limits) -> Result<(), CompileError> {
    CompileError::check_size("bytes in a `pattern`", regex.len(), limits.regex_bytes)
}

fn allows_all(schema: &Value) -> bool {
    match schema {
        Value::Bool(all) => *all,
        Value::Object(keywords) => keywords.is_empty(),
        _ => false,
    }
}

fn format(value: &Value, beside: &Map<String, Value>) -> Decision {
    let name = value.as_str().unwrap_or_default();
    let is_text = match beside.get("type") {
        None => true,
        Some(Value::Array(types)) => types.iter().any(|it| it == "string"),
        Some(one) => one == "string",
    };
    if let Some((_, pattern)) = PATTERNS.iter().find(|(known, _)| *known == name) {
        return Decision::Instead(json!({"pattern": pattern}));
    }
    if HELD_FORMATS.contains(&name) {
        return Decision::Held;
    }
    match OTHER_FORMATS.contains(&name) && is_text {
        true => Decision::Refused(format!("`format` {name:?}")),
        false => Decision::SaysNothing,
    }
}

/// Of options that are types alone an answer has one that no other has.
fn one_of(options: &Value) -> Decision {
    let Some(types) = options.as_array().and_then(|it| types_of_one(it)) else {
        return Decision::Held;
    };
    match types.is_empty() {
        true => Decision::Held,
        false => Decision::Instead(json!({"type": types})),
    }
}

fn types_of_one(options: &[Value]) -> Option<Vec<&str>> {
    let each: Option<Vec<Vec<&str>>> = options.iter().map(types_alone).collect();
    let mut all: Vec<&str> = each?.concat();
    all.sort_unstable();
    // Every integer is a number, too.
    if all.contains(&"integer") && all.contains(&"number") {
        return None;
    }
    let runs = all.chunk_by(|one, other| one == other);
    Some(
        runs.filter(|run| run.len() == 1)
            .map(|run| run[0])
            .collect(),
    )
}

/// The types of a schema that says nothing else, each once.
fn types_alone(schema: &Value) -> Option<Vec<&str>> {
    let schema = schema.as_object().filter(|it| it.len() == 1)?;
    let mut types: Vec<&str> = match schema.get("type")? {
        Value::String(name) => vec![name],
        Value::Array(names) => names.iter().map(Value::as_str).collect::<Option<_>>()?,
        _ => return None,
    };
    types.sort_unstable();
    types.dedup();
    Some(types)
}

/// A name that no keyword lists may come twice in an answer, which JSON's readers take for one. So what counts names
/// is held only where one such name is enough.
fn min_properties(value: &Value, beside: &Map<String, Value>) -> Decision {
    let required = beside.get("required").and_then(Value::as_array);
    let num_required = required.map_or(0, Vec::len) as u64;
    let has_patterns = beside.contains_key("patternProperties");
    let is_closed =
        beside.get("additionalProperties") == Some(&Value::Bool(false)) && !has_patterns;
    match value.as_u64() {
        Some(least) if least > num_required + 1 && !is_closed => Decision::Refused(format!(
            "`minProperties` {least} beside {num_required} required names"
        )),
        _ => Decision::Held,
    }
}

/// Values that stand in the schema as the answer has them.
fn instance(keyword: &str, value: &Value) -> Decision {
    match value {
        Value::Number(number) if !number.as_f64().is_some_and(|it| it.abs() < LARGEST_NUMBER) => {
            Decision::Refused(format!("`{keyword}` {number}, not below 2^53"))
        }
        Value::String(text) if text.chars().any(is_unspellable) => {
            Decision::Refused(format!("`{keyword}` with a control character"))
        }
        Value::Array(values) => first_refused(keyword, values.iter()),
        Value::Object(values) => first_refused(keyword, values.values()),
        _ => Decision::Held,
    }
}

fn first_refused<'a>(keyword: &str, values: impl Iterator<Item = &'a Value>) -> Decision {
    let mut decisions = values.map(|value| instance(keyword, value));
    decisions
        .find(|it| matches!(it, Decision::Refused(_)))
        .unwrap_or(Decision::Held)
}

/// Characters whose only spelling in JSON is `\u` and digits.
fn is_unspellable(letter: char) -> bool {
    let has_short_escape = matches!(letter, '\n' | '\r' | '\t' | '\u{8}' | '\u{c}');
    (letter < ' ' || letter == '\u{7f}') && !has_short_escape
}
