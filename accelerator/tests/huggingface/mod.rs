//! Repeats trainings of Hugging Face's Trainer with ours. `tests/fixtures/trainer/README.md` describes the files.

#![allow(unreachable_pub, reason = "two tests include it")]

mod comparison;
mod fixture;
mod models;
mod run;

use burn::nn::Linear;
use burn::tensor::FloatDType;

use self::comparison::Comparison;
pub use self::comparison::check_banners;
pub use self::fixture::Case;
use self::fixture::Fixture;
use self::models::{Classifier, Cnn, Model, OneWeight};

/// Trains the cases of a file that have this type, and compares the results of Hugging Face and ours. The tolerance is
/// relative, or absolute below 1.
pub fn check(file: &str, dtype: FloatDType, tolerance: f64) {
    let fixture = Fixture::load(file);
    let mut failures = Vec::new();
    let mut count = 0;
    for case in fixture.cases_in(dtype) {
        let check = match file {
            "line" if fixture.is_of_tokens(case) => check_case::<OneWeight>,
            "line" => check_case::<Linear>,
            "transformer" => check_case::<Classifier>,
            _ => check_case::<Cnn>,
        };
        let comparison = check(&fixture, case, tolerance);
        println!("{file} {}: within {:.1e}", case.name, comparison.worst);
        failures.extend(comparison.failures);
        count += 1;
    }
    assert!(count > 0, "{file} has no case in {dtype:?}");
    assert!(
        failures.is_empty(),
        "{count} cases, {} differences:\n{}",
        failures.len(),
        failures.join("\n")
    );
    println!("{file}: {count} cases agree");
}

fn check_case<'a, M: Model>(fixture: &Fixture, case: &'a Case, tolerance: f64) -> Comparison<'a> {
    let own = run::train::<M>(fixture, case, run::Logs::AsGiven);
    let stepwise = run::train::<M>(fixture, case, run::Logs::EachStep);
    let mut comparison = Comparison::new(case, tolerance);
    for (own, stepwise) in own.iter().zip(&stepwise) {
        comparison.compare(own, stepwise);
    }
    comparison
}
