//! A JSON schema on its way to the library: what it would loosen is refused by name, what says nothing goes.

use std::collections::HashSet;

use serde_json::{Map, Value, json};

use crate::error::CompileError;
use crate::limits::Limits;
use crate::schema_keywords::{Decision, decision};
use crate::whitespace::Whitespace;

/// Escapes in strings. Without `u` a name has one spelling, so that no name comes twice.
const ESCAPES: &str = "nrbtf\\\"";
/// The library's options, in the schema's root.
const OPTIONS: &str = "x-guidance";

/// Arrays and objects inside each other.
pub(crate) fn depth(json: &str) -> usize {
    let (mut depth, mut deepest) = (0_usize, 0);
    let (mut is_text, mut is_escaped) = (false, false);
    for byte in json.bytes() {
        match byte {
            _ if is_escaped => is_escaped = false,
            b'\\' if is_text => is_escaped = true,
            b'"' => is_text = !is_text,
            _ if is_text => {}
            b'[' | b'{' => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    deepest
}

/// Reads a schema.
pub(crate) fn parse(text: &str) -> Result<Value, CompileError> {
    serde_json::from_str(text)
        .map_err(|error| CompileError::Malformed(format!("it is no JSON: {error}")))
}

/// The schema as the library takes it, with the options of this server.
pub(crate) fn checked(
    mut schema: Value,
    whitespace: &Whitespace,
    limits: &Limits,
) -> Result<Value, CompileError> {
    match schema {
        Value::Bool(true) => schema = json!({}),
        Value::Bool(false) => return Err(CompileError::Empty("the schema is false".to_owned())),
        Value::Object(_) => {}
        _ => {
            let problem = "a schema is an object, true or false";
            return Err(CompileError::Malformed(problem.to_owned()));
        }
    }
    let mut walk = Walk {
        limits,
        visited: HashSet::new(),
        references: Vec::new(),
    };
    walk.schema(&mut schema, "")?;
    walk.referenced(&mut schema)?;
    schema[OPTIONS] = options(whitespace)?;
    Ok(schema)
}

fn options(whitespace: &Whitespace) -> Result<Value, CompileError> {
    let mut options = json!({"json_allowed_escapes": ESCAPES});
    whitespace.write(&mut options)?;
    Ok(options)
}

/// Goes to every place of a schema that is a schema. Places are JSON pointers.
struct Walk<'a> {
    limits: &'a Limits,
    visited: HashSet<String>,
    /// Pointers into this document.
    references: Vec<String>,
}

impl Walk<'_> {
    fn schema(&mut self, schema: &mut Value, place: &str) -> Result<(), CompileError> {
        self.visited.insert(place.to_owned());
        let Value::Object(keywords) = schema else {
            return Ok(());
        };
        self.check_keywords(keywords, place)?;
        if let Some(pointer) = local_pointer(keywords) {
            self.references.push(pointer);
        }
        for (keyword, value) in keywords.iter_mut() {
            let place = format!("{place}/{}", escaped(keyword));
            match keyword.as_str() {
                "properties" | "patternProperties" | "$defs" | "definitions" => {
                    self.schemas_by_name(value, &place)?;
                }
                "allOf" | "anyOf" | "oneOf" | "prefixItems" => self.schemas(value, &place)?,
                "items" if value.is_array() => self.schemas(value, &place)?,
                "items" | "additionalItems" | "additionalProperties" => {
                    self.schema(value, &place)?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn check_keywords(
        &self,
        keywords: &mut Map<String, Value>,
        place: &str,
    ) -> Result<(), CompileError> {
        let mut dropped = Vec::new();
        let mut others = Vec::new();
        for (keyword, value) in keywords.iter() {
            match decision(keyword, value, keywords, self.limits)? {
                Decision::Held => {}
                Decision::SaysNothing => dropped.push(keyword.clone()),
                Decision::Instead(schema) => {
                    dropped.push(keyword.clone());
                    others.push(schema);
                }
                Decision::Refused(why) => return Err(CompileError::unsupported(why, place)),
            }
        }
        for keyword in dropped {
            keywords.shift_remove(&keyword);
        }
        if !others.is_empty()
            && let Value::Array(all) = keywords.entry("allOf").or_insert(json!([]))
        {
            all.append(&mut others);
        }
        Ok(())
    }

    fn schemas_by_name(&mut self, schemas: &mut Value, place: &str) -> Result<(), CompileError> {
        let Value::Object(schemas) = schemas else {
            return Ok(());
        };
        for (name, schema) in schemas {
            self.schema(schema, &format!("{place}/{}", escaped(name)))?;
        }
        Ok(())
    }

    fn schemas(&mut self, schemas: &mut Value, place: &str) -> Result<(), CompileError> {
        let Value::Array(schemas) = schemas else {
            return Ok(());
        };
        for (index, schema) in schemas.iter_mut().enumerate() {
            self.schema(schema, &format!("{place}/{index}"))?;
        }
        Ok(())
    }

    /// Schemas at places that no keyword names, such as OpenAPI's `components`.
    fn referenced(&mut self, root: &mut Value) -> Result<(), CompileError> {
        while let Some(pointer) = self.references.pop() {
            if self.visited.contains(&pointer) {
                continue;
            }
            if let Some(schema) = root.pointer_mut(&pointer) {
                self.schema(schema, &pointer)?;
            }
        }
        Ok(())
    }
}

/// The place that `$ref` names in its own document.
fn local_pointer(keywords: &Map<String, Value>) -> Option<String> {
    let reference = keywords.get("$ref")?.as_str()?;
    let pointer = reference.strip_prefix('#')?;
    Some(percent_decoded(pointer))
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, behind)) = rest.split_first() {
        let code = (first == b'%').then(|| behind.get(..2)).flatten();
        let code = code.and_then(|it| u8::from_str_radix(str::from_utf8(it).ok()?, 16).ok());
        bytes.push(code.unwrap_or(first));
        rest = match code {
            Some(_) => &behind[2..],
            None => behind,
        };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

/// A name in a JSON pointer.
fn escaped(name: &str) -> String {
    name.replace('~', "~0").replace('/', "~1")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(schema: Value) -> String {
        let error = checked(schema, &Whitespace::Free, &Limits::default()).unwrap_err();
        error.to_string()
    }

    #[test]
    fn depth_counts_brackets_outside_of_texts() {
        assert_eq!(depth(r#"{"a": [1, {"[[[": "]\"{{"}]}"#), 3);
        assert_eq!(depth("7"), 0);
    }

    #[test]
    fn a_keyword_that_no_mask_holds_is_refused_by_name_and_place() {
        let refused = refusal(json!({"properties": {"a/b": {"items": {"not": {}}}}}));
        assert!(refused.contains("`not`"), "{refused}");
        assert!(refused.contains("/properties/a~1b/items"), "{refused}");
    }

    #[test]
    fn schemas_at_places_without_a_keyword_are_checked_where_they_are_referenced() {
        let schema = json!({
            "$ref": "#/components/a%20b",
            "components": {"a b": {"uniqueItems": true}, "other": {"not": {}}}
        });
        let refused = refusal(schema);
        assert!(refused.contains("`uniqueItems`"), "{refused}");
    }

    #[test]
    fn a_schemas_own_options_for_the_library_are_replaced() {
        let schema = json!({"x-guidance": {"lenient": true}});
        let schema = checked(schema, &Whitespace::None, &Limits::default()).unwrap();
        assert_eq!(schema[OPTIONS], options(&Whitespace::None).unwrap());
    }

    #[test]
    fn what_says_nothing_goes() {
        let schema = json!({
            "items": {"uniqueItems": false, "format": "int-or-string", "then": {"not": {}}},
            "minContains": 2
        });
        let mut schema = checked(schema, &Whitespace::Free, &Limits::default()).unwrap();
        schema[OPTIONS].take();
        assert_eq!(schema, json!({"items": {}, (OPTIONS): null}));
    }
}
