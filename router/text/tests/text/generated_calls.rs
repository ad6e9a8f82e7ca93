//! Tool calls made of what breaks parsers, for tools with all kinds of arguments.

use serde_json::{Map, Value, json};

/// Pieces of texts: quotes, escapes, line breaks, brackets, XML's characters, markers of the families, Unicode.
const PIECES: [&str; 36] = [
    "a",
    "Zürich",
    " ",
    "\"",
    "'",
    "\\",
    "\n",
    "\t",
    "\r",
    "\\n",
    "{",
    "}",
    "[",
    "]",
    "(",
    ")",
    ",",
    ":",
    "=",
    "<",
    ">",
    "&amp;",
    "</",
    "<b>",
    "猫",
    "🙂",
    "\u{1f469}\u{200d}\u{1f680}",
    "\u{1}",
    "\u{7f}",
    "\u{2028}",
    "```",
    "<tool_call>",
    "</parameter>",
    "</arg_value>",
    "<think>",
    "[ARGS]",
];

/// Deterministic numbers (splitmix64).
pub struct Draw(u64);

impl Draw {
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    pub fn below(&mut self, bound: usize) -> usize {
        usize::try_from(self.next() % bound as u64).unwrap()
    }

    fn text(&mut self) -> String {
        (0..self.below(9))
            .map(|_| PIECES[self.below(PIECES.len())])
            .collect()
    }

    fn number(&mut self) -> Value {
        match self.below(4) {
            0 => json!(0),
            1 => json!(-17),
            2 => json!(9_007_199_254_740_993_u64),
            _ => json!(2.5e-7),
        }
    }

    fn any(&mut self, depth: usize) -> Value {
        match self.below(if depth == 0 { 4 } else { 6 }) {
            0 => Value::Null,
            1 => json!(self.below(2) == 0),
            2 => self.number(),
            3 => json!(self.text()),
            4 => (0..self.below(4)).map(|_| self.any(depth - 1)).collect(),
            _ => self.object(depth - 1),
        }
    }

    fn object(&mut self, depth: usize) -> Value {
        let fields = (0..self.below(4)).map(|_| (self.text(), self.any(depth)));
        Value::Object(fields.collect())
    }

    /// One to three calls of declared tools.
    pub fn calls(&mut self) -> Vec<(&'static str, Value)> {
        (0..1 + self.below(3)).map(|_| self.call()).collect()
    }

    fn call(&mut self) -> (&'static str, Value) {
        if self.below(8) == 0 {
            return ("now", json!({}));
        }
        let mut arguments = Map::new();
        for name in ["text", "count", "flag", "list", "fields", "maybe"] {
            if self.below(3) > 0 {
                arguments.insert(name.to_owned(), self.argument(name));
            }
        }
        (
            ["write_file", "look-up.v2"][self.below(2)],
            arguments.into(),
        )
    }

    fn argument(&mut self, name: &str) -> Value {
        match name {
            "text" => json!(self.text()),
            "count" => self.number(),
            "flag" => json!(self.below(2) == 0),
            "list" => (0..self.below(4)).map(|_| self.any(2)).collect(),
            "fields" => self.object(2),
            _ if self.below(2) == 0 => Value::Null,
            _ => json!(self.below(1000)),
        }
    }
}

/// The tools of these calls, as `OpenAI` has them.
pub fn tools() -> Vec<Value> {
    let parameters = json!({"type": "object", "properties": {
        "text": {"type": "string"},
        "count": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "fields": {"$ref": "#/$defs/Fields"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
    }, "$defs": {"Fields": {"type": "object"}}});
    let none = json!({"type": "object", "properties": {}});
    let tool = |name: &str, parameters: &Value| json!({"type": "function", "function": {"name": name, "description": "", "parameters": parameters}});
    vec![
        tool("write_file", &parameters),
        tool("look-up.v2", &parameters),
        tool("now", &none),
    ]
}
