use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;

use accelerator_tune::{
    Config, Display, IntoValue, MaxFailures, Mode, Objective, Pbt, Results, Search, SearchEnd,
    SearchFolder, SearchSpec, Space, Stop, TrialId, choice, grid_search, uniform,
};
use serde_json::{Value, json};

fn search(space: Value, folder: &Path) -> Search {
    let search = Search::new("values", Objective::new("loss", Mode::Min))
        .space(serde_json::from_value(space).unwrap())
        .folder(folder)
        .slots(2);
    quiet(search)
}

fn quiet(search: Search) -> Search {
    let search = search.display(Display::Quiet);
    search.interrupted_by(Arc::new(AtomicU32::new(0)))
}

/// A misspelt name is never taken for another one.
#[test]
fn what_names_no_parameter_is_refused_before_anything_is_made() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("search");
    let whole = |changes: &Value| {
        let mut spec = json!({"name": "s", "metric": "loss", "mode": "min", "slots": 2, "space": {
            "lr": {"uniform": [0.1, 1.0]},
            "opt": {"choice": [{"name": "sgd", "momentum": {"uniform": [0.1, 0.9]}}, {"name": "adam", "betas": [0.9, 0.99]}]},
        }});
        for (key, value) in changes.as_object().unwrap() {
            match key.as_str() {
                "pbt" => {
                    spec["scheduler"] = json!({"type": "pbt", "perturbation_interval": 1.0, "hyperparam_mutations": value})
                }
                "points_to_evaluate" | "num_samples" => spec[key] = value.clone(),
                parameter => spec["space"][parameter] = value.clone(),
            }
        }
        let spec: SearchSpec = serde_json::from_value(spec).unwrap();
        quiet(Search::from(spec)).folder(&folder)
    };
    let known = "there are lr, opt/betas/0, opt/betas/1, opt/momentum, opt/name";
    let refusals = r#"
{"pbt": {"lrr": {"uniform": [0.1, 1.0]}}} | {lr} => the scheduler `pbt`: `hyperparam_mutations` has `lrr`, which no configuration has; did you mean `lr`? KNOWN
{"pbt": {"lr": [0.1, 1.0], "opt": {"momentumm": {"uniform": [0.1, 1.0]}}}} | {lr} => has `opt/momentumm`, which no configuration has; did you mean `opt/momentum`?
{"pbt": {"opt": {"uniform": [0.1, 1.0]}}} | {lr} => has `opt`, which is a table or a list of parameters; there are
{"width": {"sample_from": {"of": "optt/name", "cases": {"sgd": 3}, "otherwise": 4}}} | {lr} => the parameter `width`: `sample_from` is of `optt/name`, which no configuration has; did you mean `opt/name`?
{"width": {"sample_from": {"of": "opt/name", "cases": {"sdg": 3}, "otherwise": 4}}} | {lr} => the parameter `width`: `cases` has sdg, a value that `opt/name` never has; did you mean `sgd`? there are adam, sgd
{"net": {"a/b": 3}} | {lr} => the parameter "a/b" has a `/`
{} | {opt/momentumm} => `{opt/momentumm}` in the program's arguments is no parameter; did you mean `opt/momentum`? KNOWN, and {trial}
{"points_to_evaluate": [{"opt": {"nam": "sgd"}}]} | {lr} => `points_to_evaluate[0]`: `opt/nam` is no parameter; did you mean `opt/name`?"#;
    for refusal in refusals.trim().lines() {
        let (search, expected) = refusal.split_once(" => ").unwrap();
        let (changes, program) = search.split_once(" | ").unwrap();
        let search = whole(&serde_json::from_str(changes).unwrap());
        let error = search.run_programs(["true", program]).unwrap_err();
        assert!(error.is_misuse(), "{error}");
        let expected = expected.replace("KNOWN", known);
        assert!(error.to_string().contains(&expected), "{error}");
        assert!(!folder.exists());
    }
    // These searches change parameters of some configurations, which are empty in the others.
    let mutations =
        json!({"opt": {"momentum": {"uniform": [0.1, 0.9]}, "betas": [[0.5, 0.6], [0.9, 0.99]]}});
    let search = whole(&json!({"num_samples": 4, "pbt": mutations}));
    let program = ["echo", "{opt/momentum}", r#"{{"loss": 1}}"#];
    let results = search.run_programs(program).unwrap();
    assert_eq!(results.ending(), SearchEnd::Finished);
}

#[test]
fn a_closure_may_make_what_is_named() {
    let folder = tempfile::tempdir().unwrap();
    let made = accelerator_tune::sample_from(|_| Ok(Space::new([("depth", 3.into())]).into()));
    let of_depth = json!({"width": {"sample_from": {"of": "net/depth", "cases": {"3": 9}}}});
    let of_depth: Space = serde_json::from_value(of_depth).unwrap();
    let mutations = serde_json::from_value(json!({"net": {"depth": [2, 3]}})).unwrap();
    let results = search(json!({}), folder.path())
        .space(Space::new([("net", made), ("by_depth", of_depth.into())]))
        .points_to_evaluate([config(json!({"net": {"depth": 3}}))])
        .scheduler(Pbt::new(1.0, mutations))
        .run_programs(["echo", "{net/depth}", r#"{{"loss": 1}}"#])
        .unwrap();
    assert_eq!(
        results.trials()[0].config.to_string(),
        r#"{"by_depth":{"width":9},"net":{"depth":3}}"#
    );
}

#[test]
fn a_searcher_of_ones_own_is_not_given_points() {
    struct Nothing;
    impl accelerator_tune::Searcher for Nothing {
        fn ask(&mut self, _: TrialId) -> accelerator_tune::Result<Option<Config>> {
            Ok(None)
        }
    }
    let folder = tempfile::tempdir().unwrap();
    let search = search(json!({"lr": 1}), folder.path())
        .points_to_evaluate([config(json!({"lr": 1}))])
        .searcher(Nothing);
    let error = search.run_programs(["true"]).unwrap_err();
    assert!(
        error.is_misuse() && error.to_string().contains("`variants`"),
        "{error}"
    );
}

fn config(value: Value) -> Config {
    serde_json::from_value(value).unwrap()
}

/// Returns the values of `clip` that the trials tried.
fn clips(results: &Results) -> Vec<f64> {
    let trials = results.trials().iter();
    trials
        .map(|trial| trial.config.parse("clip").unwrap())
        .collect()
}

#[test]
fn floats_that_json_has_not_are_kept_everywhere() {
    let root = tempfile::tempdir().unwrap();
    let folder = root.path().join("code");
    let space = || {
        let clip = grid_search([f64::INFINITY.into(), f64::NEG_INFINITY.into(), 2.5.into()]);
        let low = choice([f64::NAN.into()]);
        Space::new([
            ("clip", clip),
            ("low", low),
            ("bounds", vec![0.0, f64::INFINITY].into()),
        ])
    };
    let run = || {
        let search = search(json!({}), &folder)
            .space(space())
            .stop(Stop::new().iterations(1));
        search
            .run_programs(["echo", "{clip}", "{low}", r#"{{"loss": {clip}}}"#])
            .unwrap()
    };
    let results = run();
    let expected = [f64::INFINITY, f64::NEG_INFINITY, 2.5];
    assert_eq!(clips(&results), expected);
    let first = &results.trials()[0];
    assert!(first.config.parse::<f64>("low").unwrap().is_nan());
    assert_eq!(
        first.config.parse::<Vec<f64>>("bounds").unwrap(),
        [0.0, f64::INFINITY]
    );
    assert_eq!(
        first.last.as_ref().unwrap().value("loss"),
        Some(f64::INFINITY)
    );
    let read = |path: &Path| std::fs::read_to_string(path).unwrap();
    let params = read(&first.folder.join("params.json"));
    assert_eq!(
        params,
        "{\"bounds\":[0.0,\"Infinity\"],\"clip\":\"Infinity\",\"low\":\"NaN\"}\n"
    );
    let output = read(&first.folder.join("output.log"));
    assert!(output.starts_with("Infinity NaN "), "{output}");
    let table = read(&folder.join("results.csv"));
    assert!(table.contains("-Infinity"), "{table}");
    for name in ["journal.jsonl", "decisions.jsonl", "results.csv"] {
        let text = read(&folder.join(name));
        assert!(
            !text.contains("\"clip\":null") && text.contains("Infinity"),
            "{name}: {text}"
        );
    }
    let best = results.best_config("loss", Mode::Min).unwrap();
    assert_eq!(best.parse::<f64>("clip").unwrap(), f64::NEG_INFINITY);
    let opened = SearchFolder::open(&folder).unwrap();
    assert_eq!(clips(opened.results()), expected);
    assert_eq!(clips(&run()), expected, "it is the same search");
    assert_eq!(f64::NAN.into_value(), json!("NaN"));
}

#[test]
fn a_file_may_have_floats_that_json_has_not_in_its_space_and_points() {
    let root = tempfile::tempdir().unwrap();
    let path = root.path().join("spec.toml");
    let text = "name = 's'\nmetric = 'loss'\nmode = 'min'\nnum_samples = 2\npoints_to_evaluate = [{ clip = -inf }]\n\
                [space]\nclip = { choice = [inf, -inf] }\nlow = nan\n[scheduler]\ntype = 'pbt'\n\
                perturbation_interval = 1\nhyperparam_mutations = { clip = [inf, -inf] }\n";
    std::fs::write(&path, text).unwrap();
    let search = quiet(SearchSpec::from_file(&path).unwrap().into());
    let search = search.folder(root.path().join("search"));
    let results = search.run_programs(["echo", r#"{{"loss": 1}}"#]).unwrap();
    assert_eq!(clips(&results)[0], f64::NEG_INFINITY);
    let low: f64 = results.trials()[1].config.parse("low").unwrap();
    assert!(low.is_nan());
}

/// A search could not read them from its journal again.
#[test]
fn settings_that_json_has_not_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let plateau = accelerator_tune::Plateau {
        metric: "loss".into(),
        std: f64::INFINITY,
        results: 4,
        grace_period: 4,
    };
    let space = || Space::new([("lr", uniform(0.1, 1.0))]);
    let of_pbt = |change: fn(&mut Pbt)| {
        let mut pbt = Pbt::new(1.0, space());
        change(&mut pbt);
        search(json!({}), folder.path())
            .space(space())
            .scheduler(pbt)
    };
    for (search, expected) in [
        (
            search(json!({}), folder.path()).stop(Stop::new().plateau(plateau)),
            "`stop.plateau.std` is inf",
        ),
        (
            of_pbt(|pbt| pbt.burn_in_period = f64::NAN),
            "`burn_in_period` is NaN",
        ),
        (
            of_pbt(|pbt| pbt.perturbation_factors.1 = f64::INFINITY),
            "`perturbation_factors` are 1.2 and inf",
        ),
    ] {
        let error = search.run_programs(["true"]).unwrap_err();
        assert!(
            error.is_misuse() && error.to_string().contains(expected),
            "{error}"
        );
    }
}

#[test]
fn any_number_of_failures_is_minus_one() {
    let any: MaxFailures = serde_json::from_value(json!(-1)).unwrap();
    assert_eq!(any, MaxFailures::Unlimited);
    assert_eq!(serde_json::to_value(any).unwrap(), json!(-1));
    assert_eq!(MaxFailures::from(3), MaxFailures::AtMost(3));
}
