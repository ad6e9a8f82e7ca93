//! A name and marked pairs of argument names and texts, which become a JSON object.

use serde_json::Value;

use super::call::{Progress, Reading};
use super::format::Tagged;
use super::held::{MAX_NAME_BYTES, Next, SPACES, find};
use super::json::{escape_into, is_number};
use super::tools::{Accepts, Kind};

#[derive(Debug)]
pub(super) struct TaggedCall {
    syntax: &'static Tagged,
    at: At,
    tool: String,
    num_arguments: usize,
    /// A value that is not a text, until it ends.
    value: String,
    /// Line breaks at a value's end so far, which may not be part of it.
    pad: &'static str,
}

#[derive(Clone, Copy, Debug)]
enum At {
    Name,
    BeforeKey,
    Key,
    /// Between a key and its value.
    Gap(Kind),
    /// The line break before a value.
    Pad(Kind),
    Value(Kind),
    /// Behind what looked like a value's end.
    AfterValue(Kind),
}

impl TaggedCall {
    pub(super) fn new(syntax: &'static Tagged) -> Self {
        Self {
            syntax,
            at: At::Name,
            tool: String::new(),
            num_arguments: 0,
            value: String::new(),
            pad: "",
        }
    }

    pub(super) fn has_begun(&self) -> bool {
        !matches!(self.at, At::Name)
    }

    pub(super) fn read(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        match self.at {
            At::Name => self.read_name(reading),
            At::BeforeKey => self.read_before_key(reading),
            At::Key => self.read_key(reading),
            At::Gap(kind) => self.read_gap(kind, reading),
            At::Pad(kind) => self.read_pad(kind, reading),
            At::Value(kind) => self.read_value(kind, reading),
            At::AfterValue(kind) => self.read_after_value(kind, reading),
        }
    }

    fn go_to(&mut self, at: At) -> Progress {
        self.at = at;
        Progress::Again
    }

    fn read_name(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        let tags = self.syntax;
        if tags.name_end == "\n" && self.tool.is_empty() {
            reading.held.skip_whitespace();
        }
        let rest = reading.held.rest();
        let ends = [tags.name_end, tags.key_begin, tags.call_end];
        let found = find(rest, &ends).and_then(|found| Some((found.start, found.marker?)));
        let Some((start, marker)) = found else {
            return match rest.len() > MAX_NAME_BYTES {
                true => Progress::NoCall,
                false => Progress::More,
            };
        };
        let tool = rest[..start].trim_matches(SPACES).to_owned();
        if !reading.tools.declares(&tool) {
            return Progress::Undeclared;
        }
        let is_name_end = marker == 0;
        reading
            .held
            .advance(start + if is_name_end { tags.name_end.len() } else { 0 });
        reading.begin(&tool, None);
        self.tool = tool;
        self.go_to(At::BeforeKey)
    }

    fn read_before_key(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        reading.held.skip_whitespace();
        let at_key = reading.held.next(self.syntax.key_begin);
        if at_key == Next::Read {
            return self.go_to(At::Key);
        }
        match reading.held.next(self.syntax.call_end) {
            Next::Missing if at_key == Next::Missing => self.close(reading),
            Next::Missing | Next::Undecided => Progress::More,
            Next::Read => self.close(reading),
        }
    }

    /// What is no argument ends the call.
    fn close(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        reading.arguments(if self.num_arguments == 0 { "{}" } else { "}" });
        Progress::Ended
    }

    fn read_key(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        let rest = reading.held.rest();
        let found = find(rest, &[self.syntax.key_end]).filter(|found| found.marker.is_some());
        let Some(found) = found else {
            return match rest.len() > MAX_NAME_BYTES {
                true => self.close(reading),
                false => Progress::More,
            };
        };
        let key = rest[..found.start].trim_matches(SPACES);
        let kind = reading.tools.kind(&self.tool, key);
        let mut opening = String::from(if self.num_arguments == 0 {
            "{\""
        } else {
            ", \""
        });
        escape_into(key, &mut opening);
        opening.push_str("\": ");
        if kind == Kind::Text {
            opening.push('"');
        }
        self.num_arguments += 1;
        reading
            .held
            .advance(found.start + self.syntax.key_end.len());
        reading.arguments(&opening);
        self.go_to(At::Gap(kind))
    }

    fn read_gap(&mut self, kind: Kind, reading: &mut Reading<'_, '_>) -> Progress {
        if self.syntax.value_begin.is_empty() {
            return self.go_to(At::Pad(kind));
        }
        reading.held.skip_whitespace();
        match reading.held.next(self.syntax.value_begin) {
            Next::Undecided => Progress::More,
            // A model that forgot the marker goes on with the value.
            Next::Missing | Next::Read => self.go_to(At::Pad(kind)),
        }
    }

    fn read_pad(&mut self, kind: Kind, reading: &mut Reading<'_, '_>) -> Progress {
        if self.syntax.is_padded && reading.held.next("\n") == Next::Undecided {
            return Progress::More;
        }
        self.go_to(At::Value(kind))
    }

    fn read_value(&mut self, kind: Kind, reading: &mut Reading<'_, '_>) -> Progress {
        let rest = reading.held.rest();
        let found = find(rest, &[self.syntax.value_end]);
        let end = found.map_or(rest.len(), |found| found.start);
        let is_over = found.is_some_and(|found| found.marker.is_some());
        self.take(kind, end, reading);
        match (found, is_over) {
            (_, true) => {
                reading.held.keep();
                reading.held.advance(self.syntax.value_end.len());
                self.go_to(At::AfterValue(kind))
            }
            _ => Progress::More,
        }
    }

    /// A value's end is followed by another key or the call's end; else it was part of the value.
    fn read_after_value(&mut self, kind: Kind, reading: &mut Reading<'_, '_>) -> Progress {
        reading.held.skip_whitespace();
        let tags = self.syntax;
        let rest = reading.held.rest();
        let follows = [tags.key_begin, tags.call_end];
        if follows.iter().any(|marker| rest.starts_with(marker)) {
            reading.held.release();
            self.end_value(kind, reading);
            return self.go_to(At::BeforeKey);
        }
        if follows.iter().any(|marker| marker.starts_with(rest)) {
            return Progress::More;
        }
        reading.held.rewind();
        self.take(kind, tags.value_end.len(), reading);
        self.go_to(At::Value(kind))
    }

    /// Takes the next bytes as part of the value, but for a line break at its end.
    fn take(&mut self, kind: Kind, num_bytes: usize, reading: &mut Reading<'_, '_>) {
        if num_bytes == 0 {
            return;
        }
        let piece = &reading.held.rest()[..num_bytes];
        let mut text = String::from(self.pad);
        self.pad = if self.syntax.is_padded && piece.ends_with('\n') {
            "\n"
        } else {
            ""
        };
        text.push_str(&piece[..num_bytes - self.pad.len()]);
        reading.held.advance(num_bytes);
        self.write(kind, &text, reading);
    }

    fn write(&mut self, kind: Kind, text: &str, reading: &mut Reading<'_, '_>) {
        if kind != Kind::Text {
            self.value.push_str(text);
            return;
        }
        let mut escaped = String::with_capacity(text.len());
        escape_into(text, &mut escaped);
        reading.arguments(&escaped);
    }

    fn end_value(&mut self, kind: Kind, reading: &mut Reading<'_, '_>) {
        self.pad = "";
        match kind {
            Kind::Text => reading.arguments("\""),
            Kind::Json(accepts) => {
                let value = std::mem::take(&mut self.value);
                let text = value.trim_matches(SPACES);
                let is_json = takes_json(accepts, text);
                match (is_json, python_word(text)) {
                    (true, _) => reading.arguments(text),
                    (false, Some(json)) if accepts.takes(&json) => {
                        reading.arguments(&json.to_string());
                    }
                    (false, _) => {
                        let mut quoted = String::from("\"");
                        escape_into(&value, &mut quoted);
                        quoted.push('"');
                        reading.arguments(&quoted);
                    }
                }
            }
        }
    }

    /// No text follows: passes on the value so far.
    pub(super) fn flush(&mut self, reading: &mut Reading<'_, '_>) {
        if matches!(self.at, At::AfterValue(_)) {
            reading.held.advance_to_end();
        }
        let value = std::mem::take(&mut self.value);
        reading.arguments(&value);
        if !matches!(self.at, At::Value(_)) {
            reading.held.advance_to_end();
        }
    }
}

/// Whether the text is JSON of a type that the schema allows; of numbers however large.
fn takes_json(accepts: Accepts, text: &str) -> bool {
    match serde_json::from_str(text) {
        Ok(json) => accepts.takes(&json),
        Err(_) => accepts.number && is_number(text),
    }
}

fn python_word(text: &str) -> Option<Value> {
    match text {
        "True" => Some(Value::Bool(true)),
        "False" => Some(Value::Bool(false)),
        "None" => Some(Value::Null),
        _ => None,
    }
}
