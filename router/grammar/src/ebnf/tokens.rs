//! The tokens of EBNF.

use std::iter::Peekable;
use std::str::Chars;

use crate::error::CompileError;

/// One token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Token {
    Name(String),
    Assign,
    Text(String),
    /// A regular expression of one character.
    Letter(String),
    Open,
    Close,
    Or,
    /// At least and at most so many; None: any number.
    Repeat(u32, Option<u32>),
}

/// The most that a count may say.
const MAX_COUNT: u32 = 10_000;

/// Splits a grammar.
pub(crate) fn tokens(text: &str) -> Result<Vec<Token>, CompileError> {
    let mut reader = Reader {
        letters: text.chars().peekable(),
    };
    let mut tokens = Vec::new();
    while let Some(token) = reader.token()? {
        tokens.push(token);
    }
    Ok(tokens)
}

pub(crate) fn malformed(problem: impl Into<String>) -> CompileError {
    CompileError::Malformed(problem.into())
}

struct Reader<'a> {
    letters: Peekable<Chars<'a>>,
}

impl Reader<'_> {
    fn token(&mut self) -> Result<Option<Token>, CompileError> {
        self.skip_spaces();
        let Some(letter) = self.letters.next() else {
            return Ok(None);
        };
        Ok(Some(match letter {
            '|' => Token::Or,
            '(' => Token::Open,
            ')' => Token::Close,
            '*' => Token::Repeat(0, None),
            '+' => Token::Repeat(1, None),
            '?' => Token::Repeat(0, Some(1)),
            '.' => Token::Letter(r"[\x{0}-\x{10FFFF}]".to_owned()),
            '{' => self.counts()?,
            '"' => Token::Text(self.text()?),
            '[' => Token::Letter(self.class()?),
            ':' => self.assign()?,
            _ if is_name(letter) => Token::Name(self.name(letter)),
            _ => return Err(malformed(format!("{letter:?} begins no part of a grammar"))),
        }))
    }

    fn skip_spaces(&mut self) {
        while let Some(letter) = self.letters.peek() {
            match letter {
                '#' => while self.letters.next_if(|it| *it != '\n').is_some() {},
                _ if letter.is_whitespace() => {
                    self.letters.next();
                }
                _ => return,
            }
        }
    }

    fn name(&mut self, first: char) -> String {
        let mut name = String::from(first);
        while let Some(letter) = self.letters.next_if(|it| is_name(*it)) {
            name.push(letter);
        }
        name
    }

    fn assign(&mut self) -> Result<Token, CompileError> {
        match (self.letters.next(), self.letters.next()) {
            (Some(':'), Some('=')) => Ok(Token::Assign),
            _ => Err(malformed("a rule's name is followed by `::=`")),
        }
    }

    /// `{2}`, `{2,}` or `{2,5}`.
    fn counts(&mut self) -> Result<Token, CompileError> {
        let mut inside = String::new();
        loop {
            match self.letters.next() {
                Some('}') => break,
                Some(letter) if !letter.is_whitespace() => inside.push(letter),
                Some(_) => {}
                None => return Err(malformed("a `{` has no `}`")),
            }
        }
        let problem = || malformed(format!("`{{{inside}}}` is no count up to {MAX_COUNT}"));
        let number = |text: &str| {
            let number = text.parse::<u32>().ok().filter(|it| *it <= MAX_COUNT);
            number.ok_or_else(problem)
        };
        Ok(match inside.split_once(',') {
            None => Token::Repeat(number(&inside)?, Some(number(&inside)?)),
            Some((least, "")) => Token::Repeat(number(least)?, None),
            Some(("", most)) => Token::Repeat(0, Some(number(most)?)),
            Some((least, most)) => Token::Repeat(number(least)?, Some(number(most)?)),
        })
    }

    fn text(&mut self) -> Result<String, CompileError> {
        let mut text = String::new();
        loop {
            match self.letters.next() {
                Some('"') => return Ok(text),
                Some('\\') => text.push(self.escape()?),
                Some(letter) => text.push(letter),
                None => return Err(malformed("a text has no closing `\"`")),
            }
        }
    }

    fn escape(&mut self) -> Result<char, CompileError> {
        let letter = self.letters.next();
        Ok(match letter {
            Some('n') => '\n',
            Some('r') => '\r',
            Some('t') => '\t',
            Some('x') => self.code(2)?,
            Some('u') => self.code(4)?,
            Some('U') => self.code(8)?,
            Some(letter) if !letter.is_alphanumeric() => letter,
            _ => return Err(malformed(format!("`\\` before {letter:?} means nothing"))),
        })
    }

    fn code(&mut self, num_digits: usize) -> Result<char, CompileError> {
        let digits: String = self.letters.by_ref().take(num_digits).collect();
        let code = u32::from_str_radix(&digits, 16).ok();
        let code = code.filter(|_| digits.len() == num_digits);
        code.and_then(char::from_u32).ok_or_else(|| {
            malformed(format!(
                "{digits:?} are not {num_digits} digits of a character"
            ))
        })
    }

    /// A class of characters as the library writes it: each by its number.
    fn class(&mut self) -> Result<String, CompileError> {
        let is_negated = self.letters.next_if_eq(&'^').is_some();
        let mut class = String::new();
        while let Some(first) = self.class_letter()? {
            let mut last = first;
            let mut ahead = self.letters.clone();
            if ahead.next() == Some('-') && !matches!(ahead.peek(), None | Some(']')) {
                self.letters.next();
                last = self.class_letter()?.unwrap_or(first);
            }
            if last < first {
                return Err(malformed(format!(
                    "a class goes from {first:?} down to {last:?}"
                )));
            }
            class += &format!(r"\x{{{:x}}}-\x{{{:x}}}", first as u32, last as u32);
        }
        match (is_negated, class.is_empty()) {
            (false, true) => Err(malformed("the class `[]` has no character")),
            (true, true) => Ok(r"[\x{0}-\x{10FFFF}]".to_owned()),
            (true, false) => Ok(format!("[^{class}]")),
            (false, false) => Ok(format!("[{class}]")),
        }
    }

    fn class_letter(&mut self) -> Result<Option<char>, CompileError> {
        match self.letters.next() {
            Some(']') => Ok(None),
            Some('\\') => self.escape().map(Some),
            Some(letter) => Ok(Some(letter)),
            None => Err(malformed("a class has no closing `]`")),
        }
    }
}

fn is_name(letter: char) -> bool {
    letter.is_ascii_alphanumeric() || letter == '_' || letter == '-'
}
