//! Suggestions for misspelt names.

/// Returns the known name that is most like an unknown one. The last part of a path may match alone.
pub(crate) fn nearest<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let distance = |known: &str| {
        let last = known.rsplit('/').next().unwrap_or(known);
        let to = |known: &str| strsim::damerau_levenshtein(name, known);
        to(known).min(to(last))
    };
    let length = |text: &str| text.chars().count();
    let known = known.into_iter().map(|known| (distance(known), known));
    let near = known.filter(|(distance, known)| {
        *distance <= MOST_EDITS && *distance < length(name).min(length(known))
    });
    near.min_by_key(|(distance, _)| *distance)
        .map(|(_, known)| known)
}

/// Returns the end of a message about an unknown name: the nearest known one, and all of them.
pub(crate) fn instead<'a>(name: &str, known: impl IntoIterator<Item = &'a str>) -> String {
    let known: Vec<_> = known.into_iter().collect();
    let there_are = match known.is_empty() {
        true => "there are none".to_owned(),
        false => format!("there are {}", known.join(", ")),
    };
    match nearest(name, known) {
        Some(near) => format!("; did you mean `{near}`? {there_are}"),
        None => format!("; {there_are}"),
    }
}

/// The most characters in which a suggestion differs.
const MOST_EDITS: usize = 2;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_one_that_differs_little() {
        let known = ["lr", "wd", "opt/momentum", "opt/name"];
        for (name, expected) in [
            ("lrr", Some("lr")),
            ("rl", Some("lr")),
            ("opt/momentumm", Some("opt/momentum")),
            ("momentum", Some("opt/momentum")),
            ("x", None),
            ("xy", None),
            ("learning_rate", None),
        ] {
            assert_eq!(nearest(name, known), expected, "{name}");
        }
        assert_eq!(
            instead("lrr", ["lr", "wd"]),
            "; did you mean `lr`? there are lr, wd"
        );
        assert_eq!(instead("lr", []), "; there are none");
    }
}
