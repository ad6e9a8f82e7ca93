//! Claims about text, through the crate's public face.

#[cfg(test)]
mod text {
    mod answers;
    mod detokenising;
    mod fixtures;
    mod folders;
    mod ggufs;
    mod prompts;
    mod support;
}
