//! The tools that a request declares.

use serde_json::{Map, Value};

/// References that are followed one after the other.
const MAX_REFERENCES: usize = 8;
/// Schemas that are looked at for one argument. Choices within choices multiply.
const MAX_LOOKED_AT: usize = 1024;

/// Which calls are calls, and the types of their arguments.
#[derive(Clone, Debug, Default)]
pub struct Tools {
    /// The JSON Schema of each tool's arguments, by name.
    parameters: Map<String, Value>,
}

/// What the schema says about an argument that comes as a plain text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// It is that text.
    Text,
    /// It is JSON where it can be read so, and may be a text else.
    Json(Accepts),
}

/// The JSON types that a schema allows beside others.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Accepts {
    /// Texts.
    pub text: bool,
    /// Numbers, integers among them.
    pub number: bool,
    /// `true` and `false`.
    pub boolean: bool,
    /// `null`.
    pub null: bool,
    /// Lists.
    pub array: bool,
    /// Objects.
    pub object: bool,
}

impl Tools {
    /// The tools of these names with the schemas of their arguments; `Null` where there is none.
    pub fn new(tools: impl IntoIterator<Item = (String, Value)>) -> Self {
        Self {
            parameters: tools.into_iter().collect(),
        }
    }

    pub(super) fn declares(&self, name: &str) -> bool {
        self.parameters.contains_key(name)
    }

    /// What this argument of this tool is as a plain text.
    pub fn kind(&self, tool: &str, argument: &str) -> Kind {
        let root = self.parameters.get(tool).unwrap_or(&Value::Null);
        let mut accepts = Accepts::default();
        match root["properties"].get(argument) {
            Some(schema) => accepts.add(root, schema, MAX_REFERENCES, &mut { MAX_LOOKED_AT }),
            None => accepts = Accepts::ANYTHING,
        }
        match accepts.is_only_text() {
            true => Kind::Text,
            false => Kind::Json(accepts),
        }
    }
}

impl Accepts {
    const ANYTHING: Self = Self {
        text: true,
        number: true,
        boolean: true,
        null: true,
        array: true,
        object: true,
    };

    fn is_only_text(self) -> bool {
        let others = self.number || self.boolean || self.null || self.array || self.object;
        self.text && !others
    }

    pub(super) fn takes(self, value: &Value) -> bool {
        match value {
            Value::Null => self.null,
            Value::Bool(_) => self.boolean,
            Value::Number(_) => self.number,
            Value::String(_) => false,
            Value::Array(_) => self.array,
            Value::Object(_) => self.object,
        }
    }

    /// `num_left` schemas may still be looked at; behind them anything may come.
    fn add(&mut self, root: &Value, schema: &Value, num_references: usize, num_left: &mut usize) {
        let Some(left) = num_left.checked_sub(1) else {
            *self = Self::ANYTHING;
            return;
        };
        *num_left = left;
        let before = *self;
        if let Some(reference) = schema["$ref"].as_str() {
            let target = reference
                .strip_prefix('#')
                .and_then(|path| root.pointer(path));
            if let (Some(target), Some(left)) = (target, num_references.checked_sub(1)) {
                self.add(root, target, left, num_left);
            }
        }
        match &schema["type"] {
            Value::String(name) => self.add_type(name),
            Value::Array(names) => names
                .iter()
                .filter_map(Value::as_str)
                .for_each(|name| self.add_type(name)),
            _ => {}
        }
        for choice in ["anyOf", "oneOf", "allOf"] {
            let choices = schema[choice].as_array().into_iter().flatten();
            if let Some(left) = num_references.checked_sub(1) {
                choices.for_each(|schema| self.add(root, schema, left, num_left));
            }
        }
        if schema["type"].is_null() {
            let listed = schema["enum"].as_array().into_iter().flatten();
            let values = listed.chain(schema.get("const"));
            values.for_each(|value| self.add_type_of(value));
        }
        if *self == before && *self == Self::default() {
            *self = Self::ANYTHING;
        }
    }

    fn add_type(&mut self, name: &str) {
        match name {
            "string" => self.text = true,
            "number" | "integer" => self.number = true,
            "boolean" => self.boolean = true,
            "null" => self.null = true,
            "array" => self.array = true,
            "object" => self.object = true,
            _ => *self = Self::ANYTHING,
        }
    }

    fn add_type_of(&mut self, value: &Value) {
        self.add_type(match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_schema_says_what_a_plain_text_is() {
        let parameters = json!({
            "properties": {
                "text": {"type": "string"},
                "name": {"$ref": "#/$defs/Name"},
                "count": {"type": "integer"},
                "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "any": {},
                "loop": {"$ref": "#/$defs/Loop"},
            },
            "$defs": {"Name": {"enum": ["a", "b"]}, "Loop": {"$ref": "#/$defs/Loop"}},
        });
        let tools = Tools::new([("f".to_owned(), parameters)]);
        let takes = |argument: &str, value: Value| match tools.kind("f", argument) {
            Kind::Text => false,
            Kind::Json(accepts) => accepts.takes(&value),
        };
        assert_eq!(tools.kind("f", "text"), Kind::Text);
        assert_eq!(tools.kind("f", "name"), Kind::Text);
        assert!(takes("count", json!(3)) && !takes("count", json!([])));
        assert!(takes("maybe", json!(null)) && !takes("maybe", json!(3)));
        assert!(takes("any", json!({})) && takes("unknown", json!(1)) && takes("loop", json!(1)));
    }
}
