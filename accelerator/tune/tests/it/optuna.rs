//! Searches with the real Optuna.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use crate::support::{
    assert_nothing_left, decisions, ended, refused, search, succeed, venv, wait_until,
};

#[test]
fn tpe_finds_better_than_random() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    // Logarithms are compared, since losses differ by powers of ten.
    let mean_of_best = |sampler: &str| {
        let seeds = ["1", "2", "3", "4"];
        let best = seeds.map(|seed| {
            let folder = folder.path().join(format!("{sampler} {seed}"));
            let arguments = format!("--num-samples 40 --seed {seed} --max-iterations 6 {QUICK}");
            succeed(&folder, &(arguments + &optuna(sampler, &python)));
            best_loss(&folder).max(1e-300).log10()
        });
        best.iter().sum::<f64>() / best.len() as f64
    };
    let (tpe, random) = (mean_of_best("TPESampler"), mean_of_best("RandomSampler"));
    assert!(tpe < random, "TPE: 1e{tpe:.2}, random: 1e{random:.2}");
}

#[test]
fn a_seed_gives_the_same_decisions_again_and_another_one_others() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let logged = |name: &str, seed: &str| {
        let folder = folder.path().join(name);
        let arguments = format!("--num-samples 14 --seed {seed} --scheduler asha {QUICK}");
        succeed(&folder, &(arguments + &optuna("TPESampler", &python)));
        (decisions(&folder), configs(&folder))
    };
    let first = logged("first", "1");
    assert_eq!(logged("again", "1"), first);
    assert_ne!(logged("other", "2").1, first.1);
}

#[test]
fn a_killed_search_continues_with_the_suggestions_that_it_would_have_got() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let arguments = "--num-samples 24 --scheduler asha --ordered 3".to_owned();
    let arguments = arguments + &optuna("TPESampler", &python);
    let undisturbed = folder.path().join("undisturbed");
    succeed(&undisturbed, &arguments);
    let killed = folder.path().join("killed");
    for asked in [4, 12, 18] {
        let mut command = search(&killed, &arguments);
        let mut child = command.env("QUADRATIC_PAUSE_MS", "20").spawn().unwrap();
        wait_until("a trial", || {
            let status = child.try_wait().unwrap();
            assert_eq!(status, None, "it ended before it was killed");
            configs(&killed).len() >= asked
        });
        child.kill().unwrap();
        ended(child);
        assert_nothing_left(&killed);
    }
    succeed(&killed, &arguments);
    assert_eq!(decisions(&killed), decisions(&undisturbed));
    assert_eq!(configs(&killed), configs(&undisturbed));
}

#[test]
fn another_suggestion_than_the_recorded_one_names_both_versions() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let arguments = format!("--num-samples 3 {QUICK}") + &optuna("TPESampler", &python);
    succeed(folder.path(), &arguments);
    let journal = folder.path().join("journal.jsonl");
    let recorded = fs::read_to_string(&journal).unwrap();
    let at = recorded.find("\"searcher\":\"Optuna 5.").unwrap();
    let version = recorded[at..].split('"').nth(3).unwrap().to_owned();
    let changed = recorded.replace(&version, "Optuna 5.0.0a1");
    let at = changed.rfind("\"momentum\":0.").unwrap() + "\"momentum\":0.".len();
    let digit = if &changed[at..=at] == "4" { "5" } else { "4" };
    fs::write(
        &journal,
        [&changed[..at], digit, &changed[at + 1..]].concat(),
    )
    .unwrap();
    let error = refused(folder.path(), &arguments);
    let expected = format!("it was Optuna 5.0.0a1, and is {version}");
    assert!(error.contains(&expected), "{error}");
}

#[test]
fn a_python_without_optuna_is_told_what_to_install() {
    let folder = tempfile::tempdir().unwrap();
    let python = script(folder.path(), "exec python3 -S -E \"$@\"");
    let out = folder.path().join("out");
    let missing = folder.path().join("missing").display().to_string();
    for (python, expected) in [
        (
            python,
            "has no Optuna (No module named 'optuna')".to_owned(),
        ),
        (missing.clone(), format!("cannot start {missing}")),
    ] {
        let error = refused(&out, &optuna("TPESampler", &python));
        assert!(error.contains(&expected), "{error}");
        assert!(error.contains("pip install 'optuna>=5,<6'"), "{error}");
    }
}

#[test]
fn a_sampler_that_optuna_does_not_have_is_refused_with_those_that_it_has() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    let error = refused(folder.path(), &optuna("TPE", &python));
    for expected in ["no sampler `TPE`", "TPESampler", "CmaEsSampler"] {
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn an_optuna_that_dies_ends_the_search_with_what_it_said_and_the_search_can_be_resumed() {
    let Some(python) = python() else { return };
    let folder = tempfile::tempdir().unwrap();
    // Optuna dies after twelve calls as long as this file exists.
    let dying = folder.path().join("dying");
    fs::write(&dying, "").unwrap();
    let body = format!(
        "if [ -e {dying} ]; then sed -u 12q | {python} \"$@\"; echo out of memory >&2; exit 9; fi\nexec {python} \"$@\"",
        dying = dying.display()
    );
    let wrapper = script(folder.path(), &body);
    let arguments = format!("--num-samples 6 {QUICK}") + &optuna("CmaEsSampler", &wrapper);
    let out = folder.path().join("out");
    let error = refused(&out, &arguments);
    assert!(error.contains("exit status: 9"), "{error}");
    assert!(error.contains("out of memory"), "{error}");
    fs::remove_file(dying).unwrap();
    succeed(&out, &arguments);
    assert_eq!(configs(&out).len(), 6);
}

/// Arguments for few processes, and for decisions that do not depend on timing.
const QUICK: &str = "--warm --ordered 2";

fn optuna(sampler: &str, python: &str) -> String {
    format!(" --optuna {sampler} --python {python}")
}

/// Returns the interpreter that `tests/track/install optuna` makes.
fn python() -> Option<String> {
    let python = venv("optuna")?.join("bin/python");
    Some(python.display().to_string())
}

/// Writes an executable shell script.
fn script(folder: &Path, body: &str) -> String {
    let path = folder.join("python");
    fs::write(&path, format!("#!/bin/sh\n{body}\n")).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    path.display().to_string()
}

/// Returns the suggestions in the journal without their line numbers, since the number of reports between two
/// suggestions depends on timing.
fn configs(folder: &Path) -> Vec<String> {
    let journal = fs::read_to_string(folder.join("journal.jsonl")).unwrap_or_default();
    let suggested = journal
        .lines()
        .filter(|line| line.contains("\"momentum\":0."));
    let event = |line: &str| match line.rsplit_once(",\"line\":") {
        Some((event, _)) => event.to_owned(),
        None => line.to_owned(),
    };
    suggested.map(event).collect()
}

/// Returns the lowest of the final losses.
fn best_loss(folder: &Path) -> f64 {
    let csv = fs::read_to_string(folder.join("results.csv")).unwrap();
    let mut lines = csv.lines().map(|line| line.split(',').collect::<Vec<_>>());
    let header = lines.next().unwrap();
    let loss = header.iter().position(|name| *name == "loss").unwrap();
    let losses = lines.map(|line| line[loss].parse::<f64>().unwrap());
    losses.min_by(f64::total_cmp).unwrap()
}
