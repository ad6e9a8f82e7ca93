//! Rules from tokens.

use std::collections::HashSet;

use super::tokens::{Token, malformed};
use crate::error::CompileError;

/// Groups inside each other.
const MAX_DEPTH: usize = 64;

/// What a rule may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Node {
    Or(Vec<Node>),
    Sequence(Vec<Node>),
    Repeat(Box<Node>, u32, Option<u32>),
    Name(String),
    Text(String),
    /// A regular expression of one character.
    Letter(String),
}

/// A name and what it stands for.
pub(crate) type Rule = (String, Node);

/// All rules, by their order.
pub(crate) fn rules(tokens: &[Token]) -> Result<Vec<Rule>, CompileError> {
    let mut parser = Parser { tokens, depth: 0 };
    let mut rules: Vec<Rule> = Vec::new();
    let mut names = HashSet::new();
    while let Some(token) = parser.take() {
        let Token::Name(name) = token else {
            return Err(malformed(format!("{token:?} where a rule's name is due")));
        };
        if parser.take() != Some(&Token::Assign) {
            return Err(malformed(format!(
                "the name `{name}` is not followed by `::=`"
            )));
        }
        if !names.insert(name) {
            return Err(malformed(format!("there are two rules `{name}`")));
        }
        rules.push((name.clone(), parser.alternatives()?));
    }
    Ok(rules)
}

struct Parser<'a> {
    tokens: &'a [Token],
    depth: usize,
}

impl<'a> Parser<'a> {
    fn take(&mut self) -> Option<&'a Token> {
        let (first, rest) = self.tokens.split_first()?;
        self.tokens = rest;
        Some(first)
    }

    fn alternatives(&mut self) -> Result<Node, CompileError> {
        let mut options = vec![self.sequence()?];
        while self.tokens.first() == Some(&Token::Or) {
            self.take();
            options.push(self.sequence()?);
        }
        Ok(match options.len() {
            1 => options.remove(0),
            _ => Node::Or(options),
        })
    }

    fn sequence(&mut self) -> Result<Node, CompileError> {
        let mut parts = Vec::new();
        while let Some(part) = self.part()? {
            parts.push(part);
        }
        Ok(match parts.len() {
            1 => parts.remove(0),
            _ => Node::Sequence(parts),
        })
    }

    /// One part with its repetitions; None where the sequence ends.
    fn part(&mut self) -> Result<Option<Node>, CompileError> {
        let mut node = match self.tokens {
            [] | [Token::Name(_), Token::Assign, ..] => return Ok(None),
            [Token::Name(name), ..] => Node::Name(name.clone()),
            [Token::Text(text), ..] => Node::Text(text.clone()),
            [Token::Letter(regex), ..] => Node::Letter(regex.clone()),
            [Token::Open, ..] => {
                self.take();
                self.group()?
            }
            _ => return Ok(None),
        };
        // Of a group this is its end.
        self.take();
        while let Some(&Token::Repeat(least, most)) = self.tokens.first() {
            self.take();
            node = Node::Repeat(Box::new(node), least, most);
        }
        Ok(Some(node))
    }

    /// Up to the end of a group.
    fn group(&mut self) -> Result<Node, CompileError> {
        self.depth += 1;
        CompileError::check_size("levels of groups", self.depth, MAX_DEPTH)?;
        let inside = self.alternatives()?;
        self.depth -= 1;
        match self.tokens.first() {
            Some(Token::Close) => Ok(inside),
            _ => Err(malformed("a `(` has no `)`")),
        }
    }
}
