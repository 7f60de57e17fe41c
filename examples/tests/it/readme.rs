//! The README shows the difference between the two programs as it is.

use std::path::Path;

#[test]
fn the_difference_in_the_readme_is_that_of_the_examples() {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    let read = |path: &str| std::fs::read_to_string(here.join(path)).unwrap();
    let (readme, plain, prepared) = (
        read("../README.md"),
        read("mnist_plain.rs"),
        read("mnist.rs"),
    );
    let start = readme.find("```diff\n").unwrap() + "```diff\n".len();
    let shown = &readme[start..start + readme[start..].find("```").unwrap()];
    let mut changed = 0;
    for line in shown.lines() {
        let (sources, text) = match line.split_at(1) {
            ("-", text) => (vec![&plain], text),
            ("+", text) => (vec![&prepared], text),
            (" ", text) => (vec![&plain, &prepared], text),
            _ => continue,
        };
        changed += usize::from(sources.len() == 1);
        for source in sources {
            assert!(
                source.lines().any(|line| line == text),
                "not in the example: {line}"
            );
        }
    }
    assert!(changed > 20, "{changed} lines");
}
