use serde_json::Value;

use crate::checkpoint_folder;
use crate::error::{Error, Result};
use crate::fields;
use crate::runner::TrialStart;
use crate::space::{Keys, Place, Space};

/// A command with placeholders.
///
/// `{lr}` is the value of a parameter by its path; `{trial}` the trial's number, `{folder}` its folder, `{params}` a JSON file
/// with all parameters, `{metrics}` a file for its metrics, `{checkpoint}` what a checkpoint holds to continue from, or nothing.
/// `{{` is a brace.
#[derive(Debug)]
pub(crate) struct Template {
    words: Vec<String>,
    keys: Keys,
}

impl Template {
    pub(crate) fn new(words: Vec<String>, space: &Space) -> Result<Self> {
        if words.is_empty() {
            return Err(Error::misuse(
                "there is no program to run: name it after `--`",
            ));
        }
        let mut names = space.table().keys();
        if let Some(name) = names.find(|name| OTHERS.contains(&name.as_str())) {
            return Err(Error::misuse(format!(
                "the parameter `{name}` has the name of a placeholder, which stands for something else: rename it"
            )));
        }
        Ok(Self {
            words,
            keys: space.keys(),
        })
    }

    /// Fails if a placeholder is neither built in nor a parameter of the space.
    pub(crate) fn check_parameters(&self) -> Result<()> {
        let parts = self.words.iter().flat_map(|word| parts(word));
        for part in parts {
            if let Part::Placeholder(name) = part
                && !OTHERS.contains(&name)
                && self.keys.place(name) == Place::Nothing
            {
                return Err(unknown(name, &self.keys.instead_of(name)));
            }
        }
        Ok(())
    }

    /// Returns `true` if the program writes its metrics to a file.
    pub(super) fn has_metrics(&self) -> bool {
        self.words.iter().any(|word| word.contains("{metrics}"))
    }

    /// The command of a trial.
    pub(super) fn fill(&self, start: &TrialStart) -> Result<Vec<String>> {
        let fill = |word: &String| {
            let parts = parts(word).into_iter().map(|part| match part {
                Part::Text(text) => Ok(text.to_owned()),
                Part::Placeholder(name) => self.value(name, start),
            });
            parts.collect()
        };
        self.words.iter().map(fill).collect()
    }

    fn value(&self, name: &str, start: &TrialStart) -> Result<String> {
        let folder = &start.folder;
        Ok(match name {
            "trial" => start.trial.to_string(),
            "folder" => folder.display().to_string(),
            "params" => folder.join("params.json").display().to_string(),
            "metrics" => folder.join(METRICS).display().to_string(),
            "checkpoint" => {
                let restore = start.restore.as_ref();
                let named = restore.and_then(|restore| checkpoint_folder::named(&restore.folder));
                named.map_or_else(String::new, |path| path.display().to_string())
            }
            path => match start.config.value(path) {
                Some(Value::String(text)) => text.clone(),
                Some(value) => value.to_string(),
                // It belongs to another option of a choice.
                None if self.keys.place(path) != Place::Nothing => String::new(),
                None => {
                    let leaves = start.config.leaves();
                    let known = leaves.iter().map(|(path, _)| path.as_str());
                    return Err(unknown(path, &fields::instead(path, known)));
                }
            },
        })
    }
}

/// Placeholders that are no parameters.
const OTHERS: [&str; 5] = ["trial", "folder", "params", "metrics", "checkpoint"];

/// The file for a program's metrics, in the trial's folder.
pub(super) const METRICS: &str = "metrics.jsonl";

enum Part<'a> {
    Text(&'a str),
    /// The name of a placeholder, without the braces.
    Placeholder(&'a str),
}

fn parts(word: &str) -> Vec<Part<'_>> {
    let mut parts = Vec::new();
    let mut rest = word;
    while let Some(at) = rest.find(['{', '}']) {
        parts.push(Part::Text(&rest[..at]));
        let (brace, after) = rest[at..].split_at(1);
        if let Some(escaped) = after.strip_prefix(brace) {
            parts.push(Part::Text(brace));
            rest = escaped;
            continue;
        }
        let end = after.find('}').filter(|_| brace == "{");
        let Some(end) = end else {
            // A brace of its own, as in a JSON argument without placeholders, stays.
            parts.push(Part::Text(brace));
            rest = after;
            continue;
        };
        parts.push(Part::Placeholder(&after[..end]));
        rest = &after[end + 1..];
    }
    parts.push(Part::Text(rest));
    parts
}

fn unknown(name: &str, instead: &str) -> Error {
    Error::misuse(format!(
        "`{{{name}}}` in the program's arguments is no parameter{instead}, and {{trial}}, {{folder}}, {{params}}, {{metrics}} \
         and {{checkpoint}}"
    ))
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use crate::config::TrialId;

    fn filled(words: &[&str], space: &str, config: &str) -> Result<Vec<String>> {
        let words = words.iter().map(|word| (*word).to_owned()).collect();
        let template = Template::new(words, &serde_json::from_str(space).unwrap())?;
        template.fill(&TrialStart {
            trial: TrialId::new(3),
            config: serde_json::from_str(config).unwrap(),
            folder: PathBuf::from("/t"),
            restore: None,
        })
    }

    #[test]
    fn a_parameter_of_another_option_is_empty() {
        let space = r#"{"opt": {"choice": [{"name": "sgd", "momentum": {"uniform": [0.1, 0.9]}}, {"name": "adam"}]}}"#;
        let words = ["--momentum={opt/momentum}"];
        let filled = filled(&words, space, r#"{"opt": {"name": "adam"}}"#);
        assert_eq!(filled.unwrap(), ["--momentum="]);
    }

    #[test]
    fn placeholders_are_filled_with_parameters() {
        let config = r#"{"lr": 0.5, "opt": {"name": "sgd"}}"#;
        for (word, expected) in [
            ("--lr={lr}", "--lr=0.5"),
            ("{opt/name}", "sgd"),
            ("{{x}}", "{x}"),
            ("{trial}", "00003"),
            ("{params}", "/t/params.json"),
            ("a{checkpoint}b", "ab"),
            ("}", "}"),
            ("{opt}", r#"{"name":"sgd"}"#),
        ] {
            assert_eq!(filled(&[word], "{}", config).unwrap(), [expected]);
        }
        let error = filled(&["{rate}"], "{}", config).unwrap_err().to_string();
        assert!(error.contains("there are lr, opt/name"), "{error}");
    }
}
