//! Why a constraint is refused.

use std::time::Duration;

/// Why a constraint has no grammar. The text goes behind the field's name: "`response_format` " + text.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompileError {
    /// A cap is exceeded.
    #[error("has {given} {what}, where at most {allowed} are allowed; send a smaller one")]
    TooLarge {
        /// What is counted.
        what: &'static str,
        /// How many.
        given: usize,
        /// How many may be.
        allowed: usize,
    },
    /// Well formed, and too large for what it becomes.
    #[error("becomes too large a grammar ({0}); send a simpler one")]
    TooComplex(String),
    /// What no mask can hold, by name.
    #[error(
        "has {what}{place}, which this server cannot hold an answer to; leave it out, or say it in other words"
    )]
    Unsupported {
        /// The keyword, and why not.
        what: String,
        /// Where in the schema it stands.
        place: String,
    },
    /// It means nothing.
    #[error("cannot be read: {0}; correct it")]
    Malformed(String),
    /// No text matches.
    #[error("allows no answer at all: {0}; correct it")]
    Empty(String),
    /// A part of it has no finite text.
    #[error("never ends: `{0}` has no finite text; give it an alternative that does not repeat it")]
    Endless(String),
    /// The limit on time.
    #[error("was not compiled in {} s of computing; send a simpler one", .0.as_secs_f32())]
    TooSlow(Duration),
    /// As many of the tenant's as may be are compiled that nobody waits for any more.
    #[error(
        "cannot be compiled now: earlier ones of yours, that took too long, still go on; try again later"
    )]
    Busy,
    /// Somebody cancelled.
    #[error("was cancelled")]
    Cancelled,
}

impl CompileError {
    pub(crate) fn unsupported(what: impl Into<String>, path: &str) -> Self {
        let place = match path {
            "" => String::new(),
            path => format!(" at `{path}`"),
        };
        Self::Unsupported {
            what: what.into(),
            place,
        }
    }

    /// Refuses more than `allowed`.
    pub(crate) fn check_size(what: &'static str, given: usize, allowed: usize) -> Result<(), Self> {
        match given <= allowed {
            true => Ok(()),
            false => Err(Self::TooLarge {
                what,
                given,
                allowed,
            }),
        }
    }
}

/// Words of the library's errors, and what they are here.
const TOO_COMPLEX: [&str; 7] = [
    "too big",
    "too many",
    "too large",
    "too complex",
    "limit",
    "exceeded",
    "fuel",
];
const UNSUPPORTED: [&str; 8] = [
    "not supported",
    "unsupported",
    "Unsupported",
    "Unimplemented",
    "only supported",
    "Unknown format",
    "not disjoint",
    "look-around",
];
/// Of an error's text that is shown.
const MAX_SHOWN: usize = 300;

impl CompileError {
    /// What the library says about a constraint that it does not take.
    pub(crate) fn from_library(problem: &str) -> Self {
        let shown = shown(problem);
        if let Some(reason) = problem.split("Unsatisfiable schema: ").nth(1) {
            return Self::Empty(self::shown(reason));
        }
        if problem.contains("oneOf constraints are not supported") {
            let what = "`oneOf`, whose options may hold together (`anyOf` is held)";
            return Self::unsupported(what, "");
        }
        if problem.contains("min/maxProperties only supported") {
            let what = "`minProperties` or `maxProperties` beside optional properties";
            return Self::unsupported(what, "");
        }
        let has = |words: &[&str]| words.iter().any(|word| problem.contains(word));
        match () {
            () if has(&UNSUPPORTED) => Self::unsupported(format!("a part ({shown})"), ""),
            () if is_too_complex(problem) => Self::TooComplex(shown),
            () => Self::Malformed(shown),
        }
    }

    pub(crate) fn too_complex(problem: &str) -> Self {
        Self::TooComplex(shown(problem))
    }
}

/// Whether the library's error is about a limit on its work.
pub(crate) fn is_too_complex(problem: &str) -> bool {
    TOO_COMPLEX.iter().any(|word| problem.contains(word))
}

/// On one line, and not long.
fn shown(problem: &str) -> String {
    let lines: Vec<&str> = problem
        .split_whitespace()
        .filter(|it| !it.is_empty())
        .collect();
    let line = lines.join(" ");
    match line.char_indices().nth(MAX_SHOWN) {
        Some((end, _)) => format!("{}...", &line[..end]),
        None => line,
    }
}
