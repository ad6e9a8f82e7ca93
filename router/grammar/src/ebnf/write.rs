//! Rules in the library's language.
//!
//! The library's lexer takes the longest lexeme, where EBNF knows characters only. So a grammar without recursion
//! becomes one lexeme, and of another one each character is one: neither loses a text.

use std::collections::{HashMap, HashSet};

use super::parse::{Node, Rule};
use super::tokens::malformed;
use crate::constraint::quoted;
use crate::error::CompileError;

const ROOT: &str = "root";

/// The grammar of `root`, or of the first rule where there is none.
pub(crate) fn lark(rules: &[Rule]) -> Result<String, CompileError> {
    let by_name: HashMap<&str, &Node> = rules.iter().map(|(name, it)| (&name[..], it)).collect();
    let first = rules.first().map(|(name, _)| &name[..]);
    let root = match by_name.contains_key(ROOT) {
        true => ROOT,
        false => first.ok_or_else(|| malformed("the grammar has no rule"))?,
    };
    let mut order = Order {
        by_name: &by_name,
        is_recursive: false,
        entered: HashSet::new(),
        left: HashSet::new(),
        names: Vec::new(),
    };
    order.visit(root)?;
    let writer = Writer {
        is_lexeme: !order.is_recursive,
        numbers: order.names.iter().copied().zip(0..).collect(),
    };
    let mut lark = format!("start: {}\n", writer.name(root));
    for name in &order.names {
        lark += &format!(
            "{}: {}\n",
            writer.name(name),
            writer.node(by_name[name], true)
        );
    }
    Ok(lark)
}

/// Finds the rules in use, and whether one uses itself.
struct Order<'a> {
    by_name: &'a HashMap<&'a str, &'a Node>,
    is_recursive: bool,
    entered: HashSet<&'a str>,
    left: HashSet<&'a str>,
    names: Vec<&'a str>,
}

impl<'a> Order<'a> {
    fn visit(&mut self, name: &'a str) -> Result<(), CompileError> {
        if !self.entered.insert(name) {
            self.is_recursive |= !self.left.contains(name);
            return Ok(());
        }
        let node = self.by_name.get(name).copied();
        let node = node.ok_or_else(|| malformed(format!("there is no rule `{name}`")))?;
        self.names.push(name);
        self.visit_node(node)?;
        self.left.insert(name);
        Ok(())
    }

    fn visit_node(&mut self, node: &'a Node) -> Result<(), CompileError> {
        match node {
            Node::Or(nodes) | Node::Sequence(nodes) => {
                nodes.iter().try_for_each(|node| self.visit_node(node))
            }
            Node::Repeat(node, ..) => self.visit_node(node),
            Node::Name(name) => self.visit(name),
            Node::Text(_) | Node::Letter(_) => Ok(()),
        }
    }
}

struct Writer<'a> {
    /// Whether the whole grammar is one lexeme.
    is_lexeme: bool,
    numbers: HashMap<&'a str, usize>,
}

impl Writer<'_> {
    /// Lexemes have capitals. Names are cleaned, so each has its number.
    fn name(&self, name: &str) -> String {
        let clean: String = name
            .chars()
            .map(|letter| match letter.is_ascii_alphanumeric() {
                true => letter.to_ascii_lowercase(),
                false => '_',
            })
            .collect();
        let name = format!("r{}_{clean}", self.numbers[name]);
        match self.is_lexeme {
            true => name.to_uppercase(),
            false => name,
        }
    }

    fn node(&self, node: &Node, is_outermost: bool) -> String {
        let grouped = |text: String| match is_outermost {
            true => text,
            false => format!("({text})"),
        };
        match node {
            Node::Or(nodes) => grouped(self.joined(nodes, " | ")),
            Node::Sequence(nodes) if nodes.is_empty() => quoted(""),
            Node::Sequence(nodes) => grouped(self.joined(nodes, " ")),
            Node::Repeat(node, least, most) => {
                let most = most.map(|it| it.to_string()).unwrap_or_default();
                format!("{}{{{least},{most}}}", self.node(node, false))
            }
            Node::Name(name) => self.name(name),
            Node::Text(text) if self.is_lexeme || text.is_empty() => quoted(text),
            Node::Text(text) => {
                let letters = text
                    .chars()
                    .map(|letter| quoted(letter.encode_utf8(&mut [0; 4])));
                grouped(letters.collect::<Vec<_>>().join(" "))
            }
            Node::Letter(regex) => format!("/{regex}/"),
        }
    }

    fn joined(&self, nodes: &[Node], between: &str) -> String {
        let nodes = nodes.iter().map(|node| self.node(node, false));
        nodes.collect::<Vec<_>>().join(between)
    }
}
