use std::path::Path;

use serde_json::json;

use super::{PROGRAM, STYLE, html};
use crate::config::TrialId;
use crate::output::{TrialFolder, tests};
use crate::view::{Rung, SearchEnd, SearchView, TrialStatus};

#[test]
fn names_and_values_are_data_whatever_they_are() {
    let folder = tempfile::tempdir().unwrap();
    let mut view = search(folder.path(), 3, 4);
    let hostile = r#"</script><script>document.title="owned"</script><!--"#;
    view.name = hostile.to_owned();
    view.objective.metric = "loss".to_owned();
    view.trials[0].name = hostile.to_owned();
    view.trials[1].best_config.set("kind", hostile.into());
    view.trials[2].error = Some(hostile.to_owned());
    let page = html(&view, SearchEnd::Finished, view.trials.first()).unwrap();
    assert!(!page.contains("<script>document") && !page.contains("<!--"));
    assert_eq!(page.matches("</script>").count(), 2);
    let data = data(&page);
    assert_eq!(data["name"], hostile);
    assert_eq!(data["trials"][1]["parameters"][0], hostile);
}

#[test]
fn a_page_has_what_trials_measured_and_what_they_were_compared_at() {
    let folder = tempfile::tempdir().unwrap();
    let mut view = search(folder.path(), 4, 6);
    view.trials[3].last = None;
    view.trials[3].best = None;
    view.rungs = vec![Rung {
        time: 2.0,
        entries: vec![(TrialId::new(1), 0.5), (TrialId::new(2), f64::NAN)],
        cutoff: Some(0.25),
    }];
    let page = html(&view, SearchEnd::OutOfTime, view.trials.get(2)).unwrap();
    let data = data(&page);
    assert_eq!(data["ending"], "out of time");
    assert_eq!(data["best"], 2);
    assert_eq!(data["best_config"][1], json!(["lr", 1e-4 * 3.0]));
    assert_eq!(data["parameters"], json!(["kind", "lr"]));
    assert_eq!(data["rungs"][0]["entries"], json!([[1, 0.5], [2, "NaN"]]));
    assert_eq!(data["trials"][0]["x"], json!([1, 2, 3, 4, 5, 6]));
    assert_eq!(data["trials"][0]["y"][1], 0.333333);
    assert_eq!(data["trials"][3]["best"], json!(null));
}

#[test]
fn a_thousand_trials_of_a_hundred_results_fit_in_a_page() {
    let folder = tempfile::tempdir().unwrap();
    let view = search(folder.path(), 1000, 100);
    let page = html(&view, SearchEnd::Finished, None).unwrap();
    assert!(page.len() < 5_000_000, "{} bytes", page.len());
    assert_eq!(
        data(&page)["trials"][999]["x"].as_array().unwrap().len(),
        100
    );
}

#[test]
fn the_program_can_stand_in_a_page() {
    for text in [PROGRAM, STYLE] {
        assert!(!text.contains("</") && !text.contains("<!--"));
        for word in [
            "http:",
            "https:",
            "innerHTML",
            "document.write",
            "eval(",
            "@import",
            "url(",
        ] {
            assert!(!text.contains(word), "{word}");
        }
    }
}

fn data(page: &str) -> serde_json::Value {
    let (_, after) = page.split_once("id=\"data\"").unwrap();
    let (_, json) = after.split_once('>').unwrap();
    serde_json::from_str(json.split_once("</script>").unwrap().0).unwrap()
}

fn search(folder: &Path, trials: u32, results: u32) -> SearchView {
    let trial = |number: u32| {
        let kind = ["sgd", "adam"][number as usize % 2];
        let config = json!({"lr": 1e-4 * f64::from(number + 1), "kind": kind});
        let result = |iteration| {
            let loss = 1.0 / f64::from(number + iteration + 1);
            tests::result(iteration, &[("loss", loss)])
        };
        let last = Some(result(results));
        let mut trial = tests::trial(number, TrialStatus::Terminated, config, last);
        trial.folder = folder.join(&trial.name);
        let before = (1..=results).map(|iteration| (result(iteration), trial.config.clone()));
        let before: Vec<_> = before.collect();
        TrialFolder::open(&trial.folder, &trial.name, &trial.config, &before).unwrap();
        trial
    };
    let mut search = tests::search(["kind", "lr"], (0..trials).map(trial).collect());
    search.expected = Some(trials as usize);
    search
}
