//! Claims about text, through the crate's public face.

#[cfg(test)]
mod deepseek_messages;
#[cfg(test)]
mod detokenising;
#[cfg(test)]
mod fixtures;
#[cfg(test)]
mod folders;
#[cfg(test)]
mod generated_calls;
#[cfg(test)]
mod ggufs;
#[cfg(test)]
mod model_folder;
#[cfg(test)]
mod tool_calls;
#[cfg(test)]
mod windows;
