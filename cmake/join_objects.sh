#!/bin/sh
# join_objects.sh OUT LINKER NM OBJCOPY objects...
# Joins objects into one in which every weak function (an inline function or a template's instance, which the linker
# would otherwise merge with other files' copies) is local, and so is every inline variable (which a sanitizer's build
# holds even where it is a constant, and which would be defined twice once the groups are gone).
set -eu
out=$1 linker=$2 nm=$3 objcopy=$4
shift 4
"$linker" -r --force-group-allocation -o "$out.joined" "$@"
"$nm" --defined-only "$out.joined" | sed -n 's/^[0-9a-f]* [Wu] //p' | sort -u >"$out.weak"
if [ -s "$out.weak" ]; then
  "$objcopy" --localize-symbols="$out.weak" "$out.joined" "$out"
else  # objcopy fails on an empty list
  cp "$out.joined" "$out"
fi
rm -f "$out.joined" "$out.weak"
