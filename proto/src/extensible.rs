//! Arrays with more fields than this side knows: the others are read and dropped.

use std::fmt;
use std::marker::PhantomData;

use serde::de::value::SeqAccessDeserializer;
use serde::de::{Deserialize, Deserializer, IgnoredAny, SeqAccess, Visitor};

/// A struct read from an array with at least its fields.
pub struct Extensible<T>(pub T);

impl<'de, T: Deserialize<'de>> Deserialize<'de> for Extensible<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(ExtensibleVisitor(PhantomData))
    }
}

struct ExtensibleVisitor<T>(PhantomData<T>);

impl<'de, T: Deserialize<'de>> Visitor<'de> for ExtensibleVisitor<T> {
    type Value = Extensible<T>;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("an array of fields")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut fields: A) -> Result<Extensible<T>, A::Error> {
        let known = T::deserialize(SeqAccessDeserializer::new(&mut fields))?;
        while fields.next_element::<IgnoredAny>()?.is_some() {}
        Ok(Extensible(known))
    }
}
