//! The newer form of structural tags, `format`: what tags can hold of it.

use serde::Deserialize;
use serde_json::Value;

use crate::error::CompileError;
use crate::structural_tag::{Tag, TagContent, Tags};

/// What is held, for those who ask for more.
const HELD: &str = "a `format` of type triggered_tags, tags_with_separator, tag, json_schema or regex is held, with \
                    tags that contain a json_schema or a regex";

#[derive(Deserialize)]
struct TriggeredTags {
    triggers: Vec<String>,
    tags: Vec<FormatTag>,
    #[serde(default)]
    at_least_one: bool,
    #[serde(default)]
    stop_after_first: bool,
}

#[derive(Deserialize)]
struct SeparatedTags {
    tags: Vec<FormatTag>,
    separator: String,
    #[serde(default)]
    at_least_one: bool,
    #[serde(default)]
    stop_after_first: bool,
}

#[derive(Deserialize)]
struct FormatTag {
    begin: String,
    content: Value,
    end: String,
}

/// The tags of a `format`.
pub(crate) fn tags_of(format: Value) -> Result<Tags, CompileError> {
    match kind_of(&format).as_str() {
        "triggered_tags" => {
            let read: TriggeredTags = read(format)?;
            if read.triggers.is_empty() || read.triggers.iter().any(String::is_empty) {
                let problem = "a format of type triggered_tags has a trigger, and none is empty";
                return Err(CompileError::Malformed(problem.to_owned()));
            }
            Ok(Tags {
                tags: tags(read.tags)?,
                triggers: read.triggers,
                separator: String::new(),
                is_required: read.at_least_one,
                is_single: read.stop_after_first,
            })
        }
        "tags_with_separator" => {
            let read: SeparatedTags = read(format)?;
            Ok(Tags {
                tags: tags(read.tags)?,
                triggers: Vec::new(),
                separator: read.separator,
                is_required: read.at_least_one,
                is_single: read.stop_after_first,
            })
        }
        "tag" => Ok(alone(tag(read(format)?)?)),
        _ => Ok(alone(Tag {
            begin: String::new(),
            content: content(&format)?,
            end: String::new(),
        })),
    }
}

fn kind_of(format: &Value) -> String {
    format["type"].as_str().unwrap_or_default().to_owned()
}

fn read<T: for<'de> Deserialize<'de>>(format: Value) -> Result<T, CompileError> {
    serde_json::from_value(format)
        .map_err(|error| CompileError::Malformed(format!("a structural tag's `format`: {error}")))
}

fn tags(tags: Vec<FormatTag>) -> Result<Vec<Tag>, CompileError> {
    tags.into_iter().map(tag).collect()
}

fn tag(read: FormatTag) -> Result<Tag, CompileError> {
    Ok(Tag {
        content: content(&read.content)?,
        begin: read.begin,
        end: read.end,
    })
}

fn content(content: &Value) -> Result<TagContent, CompileError> {
    let (kind, pattern) = (kind_of(content), content["pattern"].as_str());
    match (kind.as_str(), &content["json_schema"], pattern) {
        ("json_schema", schema @ (Value::Object(_) | Value::Bool(_)), _) => {
            Ok(TagContent::JsonSchema(schema.to_string()))
        }
        ("regex", _, Some(pattern)) => Ok(TagContent::Regex(pattern.to_owned())),
        ("json_schema", ..) => Err(missing("json_schema", "a schema")),
        ("regex", ..) => Err(missing("pattern", "a text")),
        ("", ..) => Err(missing("type", "a text")),
        _ => {
            let what = format!("a `format` of type `{kind}` ({HELD})");
            Err(CompileError::unsupported(what, ""))
        }
    }
}

fn missing(field: &str, what: &str) -> CompileError {
    CompileError::Malformed(format!("a `format` has no `{field}` that is {what}"))
}

/// One tag and nothing else.
fn alone(tag: Tag) -> Tags {
    Tags {
        tags: vec![tag],
        triggers: Vec::new(),
        separator: String::new(),
        is_required: true,
        is_single: true,
    }
}
