//! Grammars of which a part has no finite text: an answer that enters it never ends.

use llguidance::earley::{CGrammar, CSymIdx};

use crate::error::CompileError;

/// Refuses a grammar with a symbol in reach that derives no finite text; returns how many symbols it has.
pub(crate) fn check(grammar: &CGrammar) -> Result<usize, CompileError> {
    let reachable = reachable(grammar);
    let is_productive = productive(grammar, &reachable);
    let mut endless = reachable.iter().filter(|it| !is_productive[it.as_index()]);
    match endless.next() {
        Some(symbol) => Err(CompileError::Endless(grammar.sym_name(*symbol).to_owned())),
        None => Ok(reachable.len()),
    }
}

fn right_sides(grammar: &CGrammar, symbol: CSymIdx) -> impl Iterator<Item = &[CSymIdx]> {
    let rules = grammar.rules_of(symbol).iter();
    rules.map(|rule| grammar.rule_rhs(*rule).0)
}

/// The start symbol and all that it may become.
fn reachable(grammar: &CGrammar) -> Vec<CSymIdx> {
    let mut is_seen = vec![false; usize::from(u16::MAX) + 1];
    is_seen[grammar.start().as_index()] = true;
    let mut seen = vec![grammar.start()];
    let mut next = 0;
    while let Some(&symbol) = seen.get(next) {
        next += 1;
        for &part in right_sides(grammar, symbol).flatten() {
            if !std::mem::replace(&mut is_seen[part.as_index()], true) {
                seen.push(part);
            }
        }
    }
    seen
}

/// By index: whether a symbol derives a finite text.
fn productive(grammar: &CGrammar, symbols: &[CSymIdx]) -> Vec<bool> {
    let num_indices = symbols.iter().map(|it| it.as_index() + 1).max();
    let mut is_productive = vec![false; num_indices.unwrap_or_default()];
    let mut settled: Vec<usize> = Vec::new();
    // Of each rule its symbol, and how many of its parts are open; of each symbol the rules with it.
    let mut open: Vec<(usize, usize)> = Vec::new();
    let mut rules_with: Vec<Vec<usize>> = vec![Vec::new(); is_productive.len()];
    for symbol in symbols {
        let data = grammar.sym_data(*symbol);
        if data.is_terminal || data.lexeme.is_some() || data.is_nullable {
            settled.push(symbol.as_index());
            continue;
        }
        for side in right_sides(grammar, *symbol) {
            for part in side {
                rules_with[part.as_index()].push(open.len());
            }
            open.push((symbol.as_index(), side.len()));
        }
    }
    while let Some(symbol) = settled.pop() {
        if std::mem::replace(&mut is_productive[symbol], true) {
            continue;
        }
        for rule in &rules_with[symbol] {
            let (of, num_open) = &mut open[*rule];
            *num_open -= 1;
            if *num_open == 0 {
                settled.push(*of);
            }
        }
    }
    is_productive
}
