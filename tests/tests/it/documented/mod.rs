//! Every public item has documentation, and an example that is compiled.
//!
//! A public item is what a user can name: functions, methods, types, variants, fields, traits, constants and
//! macros, at whatever path they are re-exported. Its example is a code block of its own, or one of its type,
//! of its module, or of another item of the same type, where that block uses it by name.

mod blocks;
mod items;
mod modules;
mod reach;

use std::path::Path;

use self::items::Item;
use self::modules::Modules;

const CRATES: [&str; 7] = [
    "accelerator",
    "accelerator/plan",
    "accelerator/collective",
    "accelerator/manifest",
    "accelerator/nccl",
    "accelerator/fault",
    "accelerator/env",
];

#[test]
fn every_public_item_has_documentation_and_an_example() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let mut report = String::new();
    for krate in CRATES {
        let items = reach::public_items(&Modules::of_crate(&root.join(krate).join("src/lib.rs")));
        assert!(
            items.len() > 20,
            "only {} public items in {krate}",
            items.len()
        );
        for item in &items {
            if !item.is_documented() {
                report += &format!("{krate}: {item}: no documentation\n");
            }
            if !has_example(item, &items) {
                report += &format!("{krate}: {item}: no example\n");
            }
        }
    }
    assert!(
        report.is_empty(),
        "{} gaps; write a code block that uses the item by name, at the item, its type or its module:\n{report}",
        report.lines().count(),
    );
}

/// Whether a compiled code block of the item shows it, or one nearby uses it by name.
fn has_example(item: &Item, items: &[Item]) -> bool {
    !item.needs_example()
        || !item.blocks().is_empty()
        || item
            .module_blocks()
            .iter()
            .any(|block| item.is_used_in(block))
        || items
            .iter()
            .filter(|other| other.is_of_the_type_of(item))
            .flat_map(Item::blocks)
            .any(|block| item.is_used_in(block))
}

/// The public items of a source that lack documentation, and those that lack an example.
fn gaps(source: &str) -> [Vec<String>; 2] {
    let items = reach::public_items(&Modules::of_source(source));
    let of = |lacks: &dyn Fn(&Item) -> bool| {
        items
            .iter()
            .filter(|item| lacks(item))
            .map(|item| item.path().to_owned())
            .collect()
    };
    [
        of(&|item| !item.is_documented()),
        of(&|item| !has_example(item, &items)),
    ]
}

fn without_example(source: &str) -> Vec<String> {
    gaps(source)[1].clone()
}

#[test]
fn what_a_user_cannot_name_needs_nothing() {
    let source = "
        pub(crate) fn inner() {}
        fn private() {}
        mod rooms { pub fn unexported() {} pub struct Room; impl Room { pub fn open(&self) {} } }
        #[doc(hidden)] pub fn hidden() {}
        #[cfg(test)] pub mod tests { pub fn test() {} }
        struct Own; impl Own { pub fn of_own() {} }
        impl Clone for Own { fn clone(&self) -> Self { Own } }
    ";
    assert_eq!(gaps(source), [[""; 0]; 2]);
}

#[test]
fn an_item_is_found_where_it_is_exported() {
    let source = "
        mod rooms {
            mod deep { pub struct Bed; impl Bed { pub fn make(&self) {} } pub enum Door { Open } }
            pub use self::deep::Bed as Couch;
            pub(crate) use self::deep::Door;
            pub mod named { pub use super::super::extra::*; }
        }
        mod extra { pub const SIZE: u8 = 1; pub(crate) const HIDDEN: u8 = 1; }
        pub use crate::rooms::{named, Couch};
    ";
    let [undocumented, unshown] = gaps(source);
    assert_eq!(
        undocumented,
        ["Couch", "Couch::make", "named", "named::SIZE"]
    );
    assert_eq!(unshown, ["Couch", "Couch::make", "named::SIZE"]);
}

#[test]
fn each_kind_of_item_is_found() {
    let source = "
        pub struct S { pub field: u8, own: u8 }
        pub enum E { V }
        pub trait T { const C: u8; fn t(&self) {} }
        pub static STATIC: u8 = 1;
        pub type A = u8;
        impl S { pub const N: u8 = 1; pub fn new() -> Self { todo!() } fn own(&self) {} }
        #[macro_export] macro_rules! shout { () => {} }
    ";
    let all = [
        "A", "E", "E::V", "S", "S::N", "S::field", "S::new", "STATIC", "T", "T::C", "T::t", "shout",
    ];
    assert_eq!(gaps(source), [all; 2]);
}

#[test]
fn an_example_is_a_block_that_is_compiled() {
    let with =
        |block: &str| format!("/// Is.\n///\n/// {block}\n/// f();\n/// ```\npub fn f() {{}}");
    for compiled in ["```", "```rust", "```no_run", "```rust,should_panic"] {
        assert_eq!(without_example(&with(compiled)), [""; 0], "{compiled}");
    }
    for other in ["```text", "```ignore", "```compile_fail", "```sh"] {
        assert_eq!(without_example(&with(other)), ["f"], "{other}");
    }
}

#[test]
fn an_example_nearby_counts_where_it_uses_the_item() {
    let source = "
        //! ```
        //! let lamp = Lamp::new();
        //! lamp.switch();
        //! // lamp.dim()
        //! # lamp.hide();
        //! assert_eq!(lamp.shown, \"lamp.shout()\", Colour::Red);
        //! ```
        pub struct Lamp { pub shown: u8, pub unshown: u8 }
        impl Lamp {
            pub fn new() {}
            pub fn switch(&self) {}
            /// ```
            /// lamp.warm(Fan::MAX);
            /// let loud = lamp;
            /// ```
            pub fn dim(&self) {}
            pub fn hide(&self) {}
            pub fn warm(&self) {}
            pub fn shout(&self) {}
            pub fn loud(&self) {}
            pub const MAX: u8 = 1;
        }
        pub enum Colour { Red, Blue }
        pub struct Fan;
        impl Fan { pub const MAX: u8 = 1; pub fn warm(&self) {} }
    ";
    assert_eq!(
        without_example(source),
        [
            "Colour::Blue",
            "Fan",
            "Fan::MAX",
            "Fan::warm",
            "Lamp::MAX",
            "Lamp::hide",
            "Lamp::loud",
            "Lamp::shout",
            "Lamp::unshown",
        ],
    );
}
