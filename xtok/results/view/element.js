// Elements by name, in HTML and in SVG. Texts are never read as markup.

const filled = (made, attributes, children) => {
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
};

export const element = (name, attributes = {}, ...children) => filled(document.createElement(name), attributes, children);

export const drawn = (name, attributes = {}, ...children) =>
  filled(document.createElementNS("http://www.w3.org/2000/svg", name), attributes, children);

// Gives it the colour of a draft, as #rrggbb, which the style sheet fits to light and dark, or another one, as it is.
export const painted = (made, colour) => {
  made.style.setProperty(colour.startsWith("#") ? "--tint" : "--shade", colour);
  return made;
};
