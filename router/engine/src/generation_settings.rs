//! Where a model's sampling defaults come from.

use std::path::PathBuf;

use plait_text::{ModelText, OutOfRange, SamplingFields};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::engine::StartError;
use crate::settings::SettingsProblem;

/// The fields that may be given, each with a number, and `do_sample`.
const FIELDS: [&str; 8] = [
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "do_sample",
];

/// The JSON of `plait.generation_settings.GenerationSettings`.
#[derive(Clone, Debug, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GenerationSettings {
    /// `auto`: the model's own; `none`: OpenAI's defaults; else a folder with a generation_config.json.
    pub generation_config: String,
    /// JSON object of fields that replace those of the file.
    pub override_generation_config: Option<String>,
}

impl Default for GenerationSettings {
    fn default() -> Self {
        Self {
            generation_config: "auto".to_owned(),
            override_generation_config: None,
        }
    }
}

impl GenerationSettings {
    /// The model with these defaults.
    pub fn apply(&self, model: ModelText) -> Result<ModelText, StartError> {
        let model = match self.generation_config.as_str() {
            "auto" => model,
            "none" | "vllm" => model.with_generation_defaults(SamplingFields::default()),
            folder => model.with_generation_folder(&PathBuf::from(folder))?,
        };
        let Some(json) = &self.override_generation_config else {
            return Ok(model);
        };
        let given = overrides(json)
            .map_err(|problem| SettingsProblem::GenerationConfig(json.clone(), problem))?;
        let defaults = given.filled_from(model.generation_defaults());
        Ok(model.with_generation_defaults(defaults))
    }
}

fn overrides(json: &str) -> Result<SamplingFields, String> {
    let object: Map<String, Value> =
        serde_json::from_str(json).map_err(|error| error.to_string())?;
    if let Some(name) = object.keys().find(|name| !FIELDS.contains(&name.as_str())) {
        return Err(format!(
            "`{name}` is not known; allowed are {}",
            FIELDS.join(", ")
        ));
    }
    let is_greedy = object.get("do_sample") == Some(&Value::Bool(false));
    let mut fields: SamplingFields =
        serde_json::from_value(Value::Object(object)).map_err(|error| error.to_string())?;
    if is_greedy {
        fields.temperature = Some(0.0);
    }
    let out_of_range = |error: OutOfRange| {
        let OutOfRange {
            field,
            given,
            allowed,
        } = error;
        format!("{field} is {given}, where {allowed} is allowed")
    };
    fields.check().map_err(out_of_range)?;
    Ok(fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn given_fields_go_before_the_models() {
        let given = overrides(r#"{"temperature": 0.25, "top_k": 7}"#).unwrap();
        let of_model = SamplingFields {
            temperature: Some(0.6),
            top_p: Some(0.9),
            ..SamplingFields::default()
        };
        let filled = given.filled_from(&of_model);
        assert_eq!(filled.temperature, Some(0.25));
        assert_eq!((filled.top_p, filled.top_k), (Some(0.9), Some(7)));
        let greedy = overrides(r#"{"do_sample": false}"#).unwrap();
        assert_eq!(greedy.temperature, Some(0.0));
    }

    #[test]
    fn what_is_no_sampling_field_or_out_of_range_is_named() {
        let unknown = overrides(r#"{"max_new_tokens": 5}"#).unwrap_err();
        assert!(
            unknown.contains("`max_new_tokens` is not known"),
            "{unknown}"
        );
        let wrong = overrides(r#"{"top_p": 2}"#).unwrap_err();
        assert!(wrong.contains("top_p is 2"), "{wrong}");
        assert!(overrides("[]").is_err());
    }
}
