//! Grammars in EBNF as llama.cpp and `XGrammar` write it (`root ::= ...`), in the library's language.

mod parse;
mod tokens;
mod write;

use llguidance::api::TopLevelGrammar;

use crate::error::CompileError;

/// Options of rules in Lark that the library reads and a mask does not hold.
const FOREIGN_OPTIONS: [&str; 5] = [
    "temperature=",
    "max_tokens=",
    "stop=",
    "capture",
    "x-guidance",
];

/// What the library compiles: of EBNF a translation, of Lark the text itself.
pub(crate) fn lowered(text: &str) -> Result<TopLevelGrammar, CompileError> {
    if !text.contains("::=") {
        let foreign = FOREIGN_OPTIONS
            .iter()
            .find(|option| text.contains(**option));
        return match foreign {
            Some(option) => Err(CompileError::unsupported(format!("`{option}`"), "")),
            None => Ok(TopLevelGrammar::from_lark(text.to_owned())),
        };
    }
    let rules = parse::rules(&tokens::tokens(text)?)?;
    Ok(TopLevelGrammar::from_lark(write::lark(&rules)?))
}
