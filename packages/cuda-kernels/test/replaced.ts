/** `of` with something else under these names. */
export const replaced = <T extends object>(of: T, other: Partial<T>): T =>
  new Proxy(of, {
    get(target, name) {
      if (name in other) return Reflect.get(other, name);
      const value: unknown = Reflect.get(target, name, target);
      return typeof value === 'function' ? value.bind(target) : value;
    },
  });
