//! JSON as Python's `json.dumps` writes it. Chat templates print objects with it, and models were
//! trained on its spaces.

use std::fmt::Write as _;

use serde_json::Value;

/// Arguments of `json.dumps`.
#[derive(Clone, Debug)]
pub(crate) struct Style {
    pub(crate) ensure_ascii: bool,
    /// What each level is indented with; `None` keeps all on one line.
    pub(crate) indent: Option<String>,
    pub(crate) item_separator: String,
    pub(crate) key_separator: String,
    pub(crate) sort_keys: bool,
}

impl Default for Style {
    /// As transformers' templates write it.
    fn default() -> Self {
        Self {
            ensure_ascii: false,
            indent: None,
            item_separator: ", ".to_owned(),
            key_separator: ": ".to_owned(),
            sort_keys: false,
        }
    }
}

/// The value's text.
pub(crate) fn dumps(value: &Value, style: &Style) -> String {
    let mut out = String::new();
    Writer {
        style,
        depth: 0,
        out: &mut out,
    }
    .value(value);
    out
}

struct Writer<'a> {
    style: &'a Style,
    depth: usize,
    out: &'a mut String,
}

impl Writer<'_> {
    fn value(&mut self, value: &Value) {
        match value {
            Value::Null => self.out.push_str("null"),
            Value::Bool(flag) => self.out.push_str(if *flag { "true" } else { "false" }),
            Value::Number(number) => match number.as_f64().filter(|_| number.is_f64()) {
                Some(float) => self.out.push_str(&float_repr(float)),
                None => self.out.push_str(&number.to_string()),
            },
            Value::String(text) => self.text(text),
            Value::Array(items) => {
                self.nested('[', ']', items.iter(), |writer, item| writer.value(item));
            }
            Value::Object(fields) => {
                let mut fields: Vec<_> = fields.iter().collect();
                if self.style.sort_keys {
                    fields.sort_by_key(|(key, _)| *key);
                }
                self.nested('{', '}', fields.into_iter(), |writer, (key, item)| {
                    writer.text(key);
                    writer.out.push_str(&writer.style.key_separator);
                    writer.value(item);
                });
            }
        }
    }

    fn nested<T>(
        &mut self,
        open: char,
        close: char,
        items: impl ExactSizeIterator<Item = T>,
        write_item: impl Fn(&mut Self, T),
    ) {
        let is_empty = items.len() == 0;
        self.out.push(open);
        self.depth += 1;
        for (index, item) in items.enumerate() {
            if index > 0 {
                self.out.push_str(&self.style.item_separator);
            }
            self.new_line();
            write_item(self, item);
        }
        self.depth -= 1;
        if !is_empty {
            self.new_line();
        }
        self.out.push(close);
    }

    fn new_line(&mut self) {
        if let Some(indent) = &self.style.indent {
            self.out.push('\n');
            self.out.push_str(&indent.repeat(self.depth));
        }
    }

    fn text(&mut self, text: &str) {
        let quoted = Value::from(text).to_string();
        if !self.style.ensure_ascii {
            self.out.push_str(&quoted);
            return;
        }
        let mut units = [0; 2];
        for letter in quoted.chars() {
            if letter.is_ascii() {
                self.out.push(letter);
                continue;
            }
            for unit in letter.encode_utf16(&mut units) {
                write!(self.out, "\\u{unit:04x}").expect("a String takes every write");
            }
        }
    }
}

/// Python's `repr` of a float: an exponent below 1e-4 and from 1e16 on.
fn float_repr(float: f64) -> String {
    let scientific = format!("{float:e}");
    let (mantissa, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    match exponent.parse::<i32>() {
        Ok(exponent) if !(-4..16).contains(&exponent) => {
            let sign = if exponent < 0 { '-' } else { '+' };
            format!("{mantissa}e{sign}{:02}", exponent.unsigned_abs())
        }
        _ if float.fract() == 0.0 => format!("{float:.1}"),
        _ => float.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_are_written_as_python_writes_them() {
        for (float, python) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (123_456_789_012_345_680.0, "1.2345678901234568e+17"),
            (1e15, "1000000000000000.0"),
            (0.0001, "0.0001"),
            (0.000_012_34, "1.234e-05"),
            (-0.0, "-0.0"),
        ] {
            assert_eq!(float_repr(float), python);
        }
    }
}
