//! `{"name": "f", "arguments": {...}}`, in any order, with other fields between.

use std::borrow::Cow;

use super::call::{Progress, Reading};
use super::held::Next;
use super::json::{NoText, Part, ValueEnd, next_part, read_short_text};

#[derive(Debug, Default)]
pub(super) struct ObjectCall {
    at: At,
    name: Option<String>,
    /// Arguments that came before the name.
    early: Option<String>,
    has_begun: bool,
    has_arguments: bool,
}

#[derive(Clone, Copy, Debug, Default)]
enum At {
    #[default]
    Open,
    Key,
    Colon(Field),
    Value(Field),
    /// Within arguments that are an object.
    Arguments(ValueEnd),
    /// Within arguments that are a JSON text of an object.
    Quoted,
    /// Within a value that began at this mark.
    Kept(Field, usize, ValueEnd),
    AfterValue,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Name,
    Arguments,
    Other,
}

impl ObjectCall {
    pub(super) fn has_begun(&self) -> bool {
        self.has_begun
    }

    /// Whether only closing brackets are missing.
    pub(super) fn is_complete(&self) -> bool {
        self.has_begun && self.has_arguments && !matches!(self.at, At::Arguments(_) | At::Quoted)
    }

    pub(super) fn read(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        if !matches!(self.at, At::Arguments(_) | At::Quoted | At::Kept(..)) {
            reading.held.skip_whitespace();
        }
        match self.at {
            At::Open => self.read_one(reading, "{", At::Key),
            At::Key => self.read_key(reading),
            At::Colon(field) => self.read_one(reading, ":", At::Value(field)),
            At::Value(field) => self.begin_value(field, reading),
            At::Arguments(end) => self.read_arguments(end, reading),
            At::Quoted => self.read_quoted(reading),
            At::Kept(field, mark, end) => self.read_kept(field, mark, end, reading),
            At::AfterValue => self.read_after_value(reading),
        }
    }

    /// What does not fit ends a call whose arguments are there, and is none else.
    fn broken(&self) -> Progress {
        match self.has_begun {
            true => Progress::Ended,
            false => Progress::NoCall,
        }
    }

    fn go_to(&mut self, at: At) -> Progress {
        self.at = at;
        Progress::Again
    }

    fn read_one(&mut self, reading: &mut Reading<'_, '_>, sign: &str, then: At) -> Progress {
        match reading.held.next(sign) {
            Next::Read => self.go_to(then),
            Next::Undecided => Progress::More,
            Next::Missing => self.broken(),
        }
    }

    fn read_key(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        match read_short_text(reading.held) {
            Ok(None) => Progress::More,
            Err(NoText) => self.broken(),
            Ok(Some(key)) => match key.as_str() {
                "name" if self.name.is_none() => self.go_to(At::Colon(Field::Name)),
                "arguments" | "parameters" if !self.has_arguments => {
                    self.go_to(At::Colon(Field::Arguments))
                }
                "id" | "type" | "index" => self.go_to(At::Colon(Field::Other)),
                // An answer in JSON is not held back for what a call never has.
                _ if self.name.is_none() => Progress::NoCall,
                _ => self.go_to(At::Colon(Field::Other)),
            },
        }
    }

    fn begin_value(&mut self, field: Field, reading: &mut Reading<'_, '_>) -> Progress {
        let Some(first) = reading.held.next_byte() else {
            return Progress::More;
        };
        match field {
            Field::Name => self.read_name(reading),
            Field::Arguments if self.name.is_some() => {
                if first != b'{' && first != b'"' {
                    let mark = reading.held.mark();
                    return self.go_to(At::Kept(field, mark, ValueEnd::default()));
                }
                self.begin(reading);
                if first == b'{' {
                    return self.go_to(At::Arguments(ValueEnd::default()));
                }
                reading.held.advance(1);
                self.go_to(At::Quoted)
            }
            Field::Arguments | Field::Other => {
                let mark = reading.held.mark();
                self.go_to(At::Kept(field, mark, ValueEnd::default()))
            }
        }
    }

    fn begin(&mut self, reading: &mut Reading<'_, '_>) {
        reading.begin(self.name.as_deref().unwrap_or_default(), None);
        self.has_begun = true;
        self.has_arguments = true;
    }

    fn read_name(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        let name = match read_short_text(reading.held) {
            Ok(None) => return Progress::More,
            Err(NoText) => return Progress::NoCall,
            Ok(Some(name)) => name,
        };
        if !reading.tools.declares(&name) {
            return Progress::Undeclared;
        }
        self.name = Some(name);
        if let Some(arguments) = self.early.take() {
            self.begin(reading);
            reading.arguments(&as_object(&arguments));
        }
        self.go_to(At::AfterValue)
    }

    fn read_arguments(&mut self, mut end: ValueEnd, reading: &mut Reading<'_, '_>) -> Progress {
        let (num_bytes, is_over) = end.read(reading.held.rest());
        reading.arguments_as_they_are(num_bytes);
        self.at = match is_over {
            true => At::AfterValue,
            false => At::Arguments(end),
        };
        again_if(is_over)
    }

    fn read_quoted(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        match next_part(reading.held.rest()) {
            Part::Plain(num_bytes) => reading.arguments_as_they_are(num_bytes),
            Part::Escaped(num_bytes, letter) => {
                reading.held.advance(num_bytes);
                reading.arguments(letter.encode_utf8(&mut [0; 4]));
            }
            Part::End => {
                reading.held.advance(1);
                self.at = At::AfterValue;
            }
            Part::Undecided => return Progress::More,
        }
        Progress::Again
    }

    fn read_kept(
        &mut self,
        field: Field,
        mark: usize,
        mut end: ValueEnd,
        reading: &mut Reading<'_, '_>,
    ) -> Progress {
        let (num_bytes, is_over) = end.read(reading.held.rest());
        reading.held.advance(num_bytes);
        if !is_over {
            self.at = At::Kept(field, mark, end);
            return Progress::More;
        }
        if field == Field::Arguments {
            let value = reading.held.since(mark).to_owned();
            self.has_arguments = true;
            if self.name.is_some() {
                self.begin(reading);
                reading.arguments(&as_object(&value));
            } else {
                self.early = Some(value);
            }
        }
        self.go_to(At::AfterValue)
    }

    fn read_after_value(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        let next = reading.held.next_byte();
        reading
            .held
            .advance(usize::from(matches!(next, Some(b',' | b'}'))));
        match next {
            None => Progress::More,
            Some(b',') => self.go_to(At::Key),
            Some(b'}') => self.close(reading),
            Some(_) => self.broken(),
        }
    }

    fn close(&mut self, reading: &mut Reading<'_, '_>) -> Progress {
        if self.name.is_none() {
            return Progress::NoCall;
        }
        if !self.has_begun {
            self.begin(reading);
            reading.arguments("{}");
        }
        Progress::Ended
    }
}

/// Arguments as an object's text: an empty one for `null`, and what a JSON text says.
fn as_object(value: &str) -> Cow<'_, str> {
    match serde_json::from_str::<Option<String>>(value) {
        Ok(None) => "{}".into(),
        Ok(Some(text)) if text.is_empty() => "{}".into(),
        Ok(Some(text)) => text.into(),
        Err(_) => value.into(),
    }
}

fn again_if(is_over: bool) -> Progress {
    match is_over {
        true => Progress::Again,
        false => Progress::More,
    }
}
