use std::collections::BTreeMap;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn draws(parameter: Parameter, count: u64) -> Vec<Value> {
    let space = Space::new([("x", parameter)]);
    let draw = |number| {
        let draw = draw::Draw {
            seed: 7,
            number,
            grid: &[],
        };
        space.draw(draw).unwrap().value("x").unwrap().clone()
    };
    (0..count).map(draw).collect()
}

fn numbers(parameter: Parameter) -> Vec<f64> {
    let drawn = draws(parameter, 20_000);
    drawn.iter().map(|value| value.as_f64().unwrap()).collect()
}

fn domain(parameter: Parameter) -> Domain {
    match parameter.0 {
        Node::Domain(domain) => domain,
        other => panic!("{other:?}"),
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len() as f64
}

fn masses(parameter: Parameter) -> BTreeMap<String, f64> {
    let mut masses = BTreeMap::new();
    for value in draws(parameter, 20_000) {
        *masses.entry(value.to_string()).or_default() += 1.0 / 20_000.0;
    }
    masses
}

#[test]
fn distributions_have_rays_moments_and_masses() {
    let uniform_mean = mean(&numbers(uniform(2.0, 4.0)));
    assert!((uniform_mean - 3.0).abs() < 0.02, "{uniform_mean}");
    let logs: Vec<_> = numbers(loguniform(1e-4, 1.0))
        .iter()
        .map(|x| x.log10())
        .collect();
    assert!((mean(&logs) + 2.0).abs() < 0.03, "{}", mean(&logs));
    let normal = numbers(randn(1.0, 2.0));
    let deviations: Vec<_> = normal.iter().map(|x| (x - 1.0) * (x - 1.0)).collect();
    assert!((mean(&normal) - 1.0).abs() < 0.05);
    assert!((mean(&deviations) - 4.0).abs() < 0.15);

    // The ends of a rounded interval have half the mass.
    let quarters = masses(quniform(0.0, 1.0, 0.25));
    for (value, mass) in [
        ("0.0", 0.125),
        ("0.25", 0.25),
        ("0.5", 0.25),
        ("0.75", 0.25),
        ("1.0", 0.125),
    ] {
        assert!((quarters[value] - mass).abs() < 0.015, "{quarters:?}");
    }
    let multiples = masses(qrandint(1, 10, 3));
    assert_eq!(multiples.keys().collect::<Vec<_>>(), ["3", "6", "9"]);
    assert!(
        multiples
            .values()
            .all(|mass| (mass - 1.0 / 3.0).abs() < 0.02)
    );
    let integers = masses(randint(2, 5));
    assert_eq!(integers.keys().collect::<Vec<_>>(), ["2", "3", "4"]);
    let options = masses(choice(["a".into(), "b".into()]));
    assert!(options.values().all(|mass| (mass - 0.5).abs() < 0.02));
}

proptest! {
    #[test]
    fn what_is_drawn_lies_within_its_bounds(
        seed: u64,
        number: u64,
        low in -1000_i64..1000,
        width in 1_i64..1000,
        q in 1_i64..50,
    ) {
        let (high, random) = (low + width, &mut Random::of(seed, &[&number.to_le_bytes()]));
        let drawn = domain(randint(low, high)).sample(random).as_i64().unwrap();
        prop_assert!((low..high).contains(&drawn));
        let multiples = domain(qrandint(low, high, q));
        if multiples.check().is_ok() {
            let drawn = multiples.sample(random).as_i64().unwrap();
            prop_assert!((low..=high).contains(&drawn) && (drawn % q == 0 || q == 1));
        }
        let (low, high) = (low as f64 / 7.0, high as f64 / 7.0);
        let drawn = domain(uniform(low, high)).sample(random).as_f64().unwrap();
        prop_assert!((low..high).contains(&drawn));
        if low > 0.0 {
            let drawn = domain(loguniform(low, high)).sample(random).as_f64().unwrap();
            prop_assert!((low..high).contains(&drawn));
        }
    }
}

#[test]
fn another_parameter_beside_it_does_not_change_a_draw() {
    let alone = Space::new([("lr", uniform(0.0, 1.0))]);
    let beside = Space::new([("a", uniform(0.0, 1.0)), ("lr", uniform(0.0, 1.0))]);
    let draw = draw::Draw {
        seed: 3,
        number: 9,
        grid: &[],
    };
    let (one, other) = (alone.draw(draw).unwrap(), beside.draw(draw).unwrap());
    assert_eq!(one.value("lr"), other.value("lr"));
    assert_ne!(other.value("lr"), other.value("a"));
}

#[test]
fn what_depends_on_others_is_drawn_after_them() {
    let of_file: Space = serde_json::from_value(json!({
        "optimizer": {"choice": [{"name": "sgd", "momentum": {"uniform": [0.1, 0.9]}}, {"name": "adam"}]},
        "width": {"sample_from": {"of": "optimizer/name", "cases": {"sgd": 64}, "otherwise": {"randint": [8, 16]}}},
    }))
    .unwrap();
    for number in 0..20 {
        let draw = draw::Draw {
            seed: 0,
            number,
            grid: &[],
        };
        let config = of_file.draw(draw).unwrap();
        let width: u64 = config.parse("width").unwrap();
        let name: String = config.parse("optimizer/name").unwrap();
        assert_eq!(name == "sgd", width == 64);
        assert_eq!(name == "sgd", config.value("optimizer/momentum").is_some());
    }
    let double =
        |of: &'static str| sample_from(move |config| Ok((2.0 * config.parse::<f64>(of)?).into()));
    let chained = Space::new([("a", double("b")), ("b", double("c")), ("c", 1.0.into())]);
    let draw = draw::Draw {
        seed: 0,
        number: 0,
        grid: &[],
    };
    assert_eq!(chained.draw(draw).unwrap().parse::<f64>("a").unwrap(), 4.0);
    let circle = Space::new([("a", double("b")), ("b", double("a"))]);
    let error = circle.draw(draw).unwrap_err().to_string();
    assert!(error.contains("`a`, `b` cannot be drawn"), "{error}");
}

#[test]
fn files_have_the_names_of_the_functions() {
    let text = json!({
        "a": {"uniform": [0.0, 1.0]}, "b": {"quniform": [0.0, 1.0, 0.5]}, "c": {"loguniform": [0.1, 1.0]},
        "d": {"randint": [1, 5]}, "e": {"lograndint": [1, 5]}, "f": {"randn": [0.0, 1.0]},
        "g": {"choice": [1, "two", {"x": {"qrandint": [0, 9, 3]}}]}, "h": {"grid_search": [1, 2]},
        "i": {"sample_from": {"of": "d", "cases": {"1": 2}, "otherwise": 3}}, "j": [1, {"uniform": [1.0, 2.0]}],
        "k": {"schedule": [[0, 0.1], [10, {"choice": [1.0, 2.0]}]]}, "l": "constant",
    });
    let space: Space = serde_json::from_value(text.clone()).unwrap();
    assert_eq!(serde_json::to_value(&space).unwrap(), text);
    let drawn = "a b c d e f g/x h i j/1 k/schedule/1/1";
    assert_eq!(space.parameters().join(" "), drawn);
}

#[test]
fn what_cannot_be_drawn_is_an_error_with_its_path() {
    let refusals = r#"
{"m": {"lr": {"uniform": [1.0, 0.5]}}} => `m/lr`
{"lr": {"loguniform": [0.0, 0.5]}} => above 0
{"lr": {"unifrom": [0.0, 0.5]}} => did you mean `uniform`
{"lr": {"uniform": [0.0]}} => 2 numbers, not 1
{"lr": {"quniform": [0.0, 1.0, 0.3]}} => multiples of the step
{"lr": {"choice": []}} => no options
{"lr": {"randint": [0.5, 3]}} => no integer
{"lr": {"sample_from": "x"}} => `of` and `cases`
3 => no table of parameters"#;
    for refusal in refusals.trim().lines() {
        let (value, expected) = refusal.split_once(" => ").unwrap();
        let value: Value = serde_json::from_str(value).unwrap();
        let error = Space::try_from(value).unwrap_err();
        assert!(error.is_misuse());
        assert!(error.to_string().contains(expected), "{refusal}: {error}");
    }
}
