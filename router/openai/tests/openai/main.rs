//! Claims about requests and answers, through the crate's public face.

#[cfg(test)]
mod choices;
#[cfg(test)]
mod constraints;
#[cfg(test)]
mod forced_calls;
#[cfg(test)]
mod limits;
#[cfg(test)]
mod messages_api;
#[cfg(test)]
#[path = "../../../text/tests/text/model_folder.rs"]
mod model_folder;
#[cfg(test)]
mod prompts;
#[cfg(test)]
mod responses;
#[cfg(test)]
mod responses_api;
#[cfg(test)]
mod support;
#[cfg(test)]
mod text_calls;
#[cfg(test)]
mod tool_calls;
